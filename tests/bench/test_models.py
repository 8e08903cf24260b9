"""The models of benchmarks have their published shapes."""

import torch

import models


def test_shapes_have_the_published_numbers_of_parameters():
    model = models.make_model(models.known_config("llama-3.2-3b"), torch.device("meta"))
    assert model.num_parameters() == 3_212_749_824
