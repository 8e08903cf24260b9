"""Errors that write their own messages say what was got, and what to do."""

from sebp_edge.errors import CannotCapture


def test_a_failed_capture_says_why_and_what_to_do():
    error = CannotCapture("Cannot copy between CPU and CUDA tensors.")
    assert str(error) == (
        "A CUDA graph cannot capture this model: Cannot copy between CPU and CUDA tensors. "
        "Avoid that in the model's code, or train without graphs."
    )
