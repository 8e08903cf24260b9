"""Ranges of characters, for regular expressions."""

# Scripts without spaces between words, or, as Korean, with endings on them: Thai to Burmese, Khmer, kana, Han, Hangul.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
UNSPACED += "\U00020000-\U0003ffff"
