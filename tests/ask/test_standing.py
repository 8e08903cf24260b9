"""A reply stands in a passage if the passage says it, letter by letter where that counts, and not the opposite."""

import pytest

from sebp_edge.ask.standing import stands_in

HOUSE = (
    "house.md\nThe boiler was serviced on 3 May. Do not use the back door before June. I am not going to sell the boat "
    "this year. It was not cold, the key is in the meter box. No. 12 is ours."
)
KAYAK = (
    "kayak.md\nI lent my kayak to Sorcha on 4 June 2024, and she paid 12 kg of flour. Anna and Paul were there. Mail "
    "her at sorcha@fjord.example or see https://fjord.example/kayak. The code is AB-1234."
)
HAUS = "haus.md\nDer Schlüssel liegt nicht im Flur. Die Heizung läuft ohne Strom."


@pytest.mark.parametrize(
    ("text", "question", "reply", "right"),
    [
        # The opposite.
        (HOUSE, "May I use the back door?", "Use the back door before June.", False),
        (HOUSE, "When may I use the back door?", "before June", False),
        (HOUSE, "When may I not use the back door?", "before June", True),
        (HOUSE, "May I use the back door?", "No, do not use the back door before June.", True),
        (HOUSE, "When was the boiler serviced?", "The boiler was never serviced on 3 May.", False),
        (HOUSE, "Was the boiler serviced?", "The boiler was not serviced.", False),
        (HOUSE, "When was the boiler serviced?", "The boiler was serviced on May 3rd.", True),
        (HOUSE, "Where is the key?", "in the meter box", True),
        (HOUSE, "Which number is ours?", "No. 12", True),
        (HAUS, "Wo liegt der Schlüssel?", "im Flur", False),
        (HAUS, "Wie läuft die Heizung?", "ohne Strom", True),
        (HAUS, "Wie läuft die Heizung?", "mit Strom", False),
        (HOUSE, "Which boat?", "I am not going to sell the boat, and not this year.", False),
        ("a.md\nI still have a cough because of the car that was rather cold and not far.", "What?", "a cough", True),
        ("a.md\nIt is taken without penalty up to 11 October.", "Until when?", "11 October", True),
        ("a.md\nThey pay up to 520 euros in all and not a cent beyond.", "How much?", "520 euros", True),
        ("a.md\nAnna did not come.", "Who came?", "Anna", False),
        # Names, as they are.
        (KAYAK, "Who has my kayak?", "Sorcha", True),
        (KAYAK, "Who has my kayak?", "Sorcha Kelly", False),
        (KAYAK, "Who was there?", "Anna and Paul", True),
        (KAYAK, "Who was there?", "Anna, Peter and Paul were there", False),
        (KAYAK, "Who was there?", "Peter, Anna and Paul", False),
        # Addresses, links, codes and units, as they are.
        (KAYAK, "What is her mail?", "sorcha@fjord.example", True),
        (KAYAK, "What is her mail?", "It is sorcha@fjord.com.", False),
        (KAYAK, "Which page?", "See https://fjord.example/kayak.", True),
        (KAYAK, "Which page?", "See https://fjord.example/boat.", False),
        (KAYAK, "What is the code?", "AB-1234", True),
        (KAYAK, "What is the code?", "AC-1234", False),
        (KAYAK, "How much flour?", "12 kg", True),
        (KAYAK, "How much flour?", "12 lb", False),
        (KAYAK, "How much flour?", "13 kg", False),
        (KAYAK, "When?", "On June 4th, 2024", True),
        # What a model says of itself.
        (HOUSE, "In which town?", "I'm sorry for the confusion, I am not going to sell the boat this year.", False),
        (HOUSE, "Which year?", "The passage does not mention a boat this year.", False),
        ("a.md\nShe was sorry about the boat.", "What about the boat?", "She was sorry", True),
    ],
)
def test_a_reply_stands_in_a_passage_that_says_it(text, question, reply, right):
    assert stands_in(reply, question, text) is right
