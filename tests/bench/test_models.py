"""The common part of benchmarks of whole models: true shapes, a reference on the same texts, no wrong gradients."""

from contextlib import contextmanager

import pytest
import torch

import models
from sebp_edge.research.bench.variants import DENSE, Variant
from speed import whole_models

CPU = torch.device("cpu")


@pytest.fixture(params=[*whole_models.tiny_encoders(), *whole_models.tiny_decoders()], ids=lambda case: case.model)
def case(request):
    return request.param


def test_wrong_gradients_of_one_small_parameter_are_refused(case):
    model, (batch, _) = models.make_model(case.config, CPU), models.make_batch(case, CPU)

    @contextmanager
    def half_a_gradient(model):
        handle = list(model.parameters())[-1].register_hook(lambda gradient: gradient / 2)
        with DENSE.attach(model) as dense:
            yield dense
        handle.remove()

    variants = (DENSE, Variant("half", half_a_gradient, DENSE.loss))
    last = list(dict(model.named_parameters()))[-1]
    with pytest.raises(models.WrongGradients, match=f"half: the gradient of {last} is off"):
        models.gradient_errors(model, batch, variants)


def test_the_reference_has_the_same_texts_with_less_padding(case):
    batch, tokens = models.make_batch(case, CPU)
    shorter = models.without_padding(batch)
    assert shorter.input_ids.shape[1] < case.context_length
    assert int(shorter.input_ids.ne(0).sum()) == int(batch.input_ids.ne(0).sum()) == tokens


def test_a_single_text_has_the_mean_length_and_several_follow_the_distribution():
    assert models.text_lengths("PTB", 1).tolist() == [26]
    several = models.text_lengths("PTB", 64)
    assert len(set(several.tolist())) > 10 and 15 < several.float().mean() < 40


def test_shapes_have_the_published_numbers_of_parameters():
    bert, *_, roberta = whole_models.encoder_cases()
    llama, *_ = whole_models.decoder_cases()
    meta = torch.device("meta")
    sizes = [models.make_model(case.config, meta).num_parameters() for case in (bert, roberta, llama)]
    assert sizes == [109_483_778, 124_647_170, 3_212_749_824]
