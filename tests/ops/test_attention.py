"""Attention of sequences in a row, against plain attention in fp64."""

import pytest
import torch
from random_cases import DEVICE, random_heads, twice

from sebp_edge.ops import Prefixes, Scores, sequence_attention_

LENGTHS = [7, 0, 1, 13]
PLAIN = Scores()


def plain(q, k, v, rotary, lengths, scores):
    """Attention written out, in the inputs' dtype."""
    cos, sin = (angles[:, None].to(q.dtype) for angles in rotary)
    half = q.shape[-1] // 2
    q, k = (x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for q_L, k_L, v_L in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        values = torch.einsum("ahe,bhe->hab", q_L, k_L) * (scores.scale or q.shape[-1] ** -0.5)
        if scores.softcap is not None:
            values = scores.softcap * torch.tanh(values / scores.softcap)
        positions = torch.arange(len(q_L), device=q.device)
        distance = positions[:, None] - positions[None]
        hidden = (scores.causal & (distance < 0)) | (distance >= (scores.window or len(q_L) + 1))
        weights = values.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hab,bhe->ahe", weights, v_L))
    return torch.cat(outputs)


BIDIRECTIONAL = Scores(causal=False)


@pytest.mark.parametrize(
    "scores",
    [
        Scores(),
        Scores(0.3),
        Scores(window=4),
        Scores(softcap=2.0),
        Scores(0.5, 3, 1.5),
        BIDIRECTIONAL,
        Scores(0.3, softcap=1.5, causal=False),
    ],
)
@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 2, 10)])
def test_attention_by_sequence_is_plain_attention(scores, heads):
    wide, rotary, cu_seqlens = random_heads(*heads, torch.float64)
    parts = [part.detach().requires_grad_() for part in wide.split([heads[0], heads[1], heads[1]], dim=1)]
    expected = plain(*parts, rotary, LENGTHS, scores)
    dout = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, parts, dout)]
    found = sequence_attention_(*parts, cu_seqlens, max(LENGTHS), scores, rotary)
    for one, other in zip([found, *torch.autograd.grad(found, parts, dout)], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scores", [Scores(), Scores(window=4), Scores(softcap=2.0)])
def test_attention_in_bf16_on_a_cpu_is_that_of_the_rounded_inputs_in_fp32(scores):
    heads = (4, 2, 8)
    wide, rotary, cu_seqlens = random_heads(*heads, torch.bfloat16)
    dout = torch.randn(len(wide), heads[0], heads[2]).bfloat16()
    found, expected = (
        attend_short(each, rotary, cu_seqlens, heads, dout.to(each.dtype), max(LENGTHS), scores)
        for each in (wide, wide.float())
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 150, 7]])
@pytest.mark.parametrize("sizes", [(24, 16), (16, 24), (192, 128)])
def test_values_may_have_another_size_than_keys(sizes, lengths):
    """As in DeepSeek's models. Zeros that fill up the smaller of them change nothing."""
    shapes = (4, sizes[0]), (2, sizes[0]), (2, sizes[1])
    parts = [torch.randn(sum(lengths), *shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    rotary = torch.ones(sum(lengths), sizes[0]), torch.zeros(sum(lengths), sizes[0])
    exact = [part.detach().cpu().double().requires_grad_() for part in parts]
    truth = plain(*exact, rotary, lengths, PLAIN)
    dout = torch.randn(truth.shape).bfloat16()
    begins = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0).int()
    found = sequence_attention_(*parts, begins, max(lengths), PLAIN)
    gradients = torch.autograd.grad(found, parts, dout.cuda())
    wanted = torch.autograd.grad(truth, exact, dout.double())
    for one, true in zip([found, *gradients], [truth, *wanted], strict=True):
        assert one.shape == true.shape
        assert (one.cpu().double() - true).norm() <= 2e-2 * true.norm()


def attend_short(wide, rotary, cu_seqlens, heads, dout, max_len=128, scores=PLAIN):
    """Outputs, and gradients of the parts of `wide`, which is not changed."""
    parts = [part.requires_grad_() for part in wide.clone().split([heads[0], heads[1], heads[1]], dim=1)]
    out = sequence_attention_(*parts, cu_seqlens, max_len, scores, rotary)
    return [out.detach(), *torch.autograd.grad(out, parts, dout)]


def assert_plain_attention(found, wide, rotary, lengths, heads, dout, scores=PLAIN):
    """Asserts outputs and gradients to be those in fp64, within a tolerance or twice the error of plain attention."""
    if rotary is None:
        rotary = torch.ones(len(wide), heads[2]), torch.zeros(len(wide), heads[2])

    def attend(dtype):
        parts = wide.cpu().to(dtype).split([heads[0], heads[1], heads[1]], dim=1)
        parts = [part.requires_grad_() for part in parts]
        out = plain(*parts, [angles.cpu() for angles in rotary], lengths, scores)
        return [out.detach(), *torch.autograd.grad(out, parts, dout.cpu().to(dtype))]

    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[wide.dtype]
    for one, same, true in zip(found, attend(wide.dtype), attend(torch.float64), strict=True):
        assert one.dtype == wide.dtype
        error, error_of_plain = (float((each.cpu().double() - true).norm()) for each in (one, same))
        assert error <= max(tolerance * float(true.norm()), 2 * error_of_plain)


# The interpreter, which is slow, computes fp16 in the tests below.
SHORT_DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize(
    ("heads", "lengths", "scores"),
    [
        ((2, 2, 32), [0, 1, 64, 65, 0], Scores()),
        ((1, 1, 32), [0, 65, 128], Scores(window=40)),
        ((4, 2, 64), [65, 0, 1, 7], BIDIRECTIONAL),
        ((2, 1, 64), [66, 64], Scores(0.3, window=3)),
        ((3, 1, 128), [7, 0, 1, 65], Scores(0.3, window=3)),
        ((4, 1, 256), [13, 65, 0], Scores()),
        ((4, 1, 512), [13, 35, 0], Scores(0.1)),
        ((2, 2, 512), [21, 1], BIDIRECTIONAL),
    ],
)
def test_attention_kernels_of_short_sequences_are_plain_attention(
    dtype, heads, lengths, scores, short_attention, poisoned_memory
):
    wide, rotary, cu_seqlens = random_heads(*heads, dtype, DEVICE, lengths)
    dout = torch.randn(len(wide), heads[0], heads[2], device=DEVICE).to(dtype)
    found = attend_short(wide, rotary, cu_seqlens, heads, dout, scores=scores)
    assert_plain_attention(found, wide, rotary, lengths, heads, dout, scores)


@pytest.mark.parametrize(
    ("lengths", "rotates", "scores"),
    [
        ([2, 1], True, PLAIN),
        ([5, 3], False, BIDIRECTIONAL),
        ([16, 17], True, PLAIN),
        ([16, 17], False, BIDIRECTIONAL),
        ([0, 33, 32], True, PLAIN),
    ],
)
def test_attention_kernels_fit_their_tiles_to_the_longest_sequence(lengths, rotates, scores, short_attention):
    heads, dtype = (6, 2, 32), torch.float16
    wide, rotary, cu_seqlens = random_heads(*heads, dtype, DEVICE, lengths)
    rotary = rotary if rotates else None
    # Heads that lie in another order than rows, as a model's own code transposes them.
    dout = torch.randn(heads[0], len(wide), heads[2], device=DEVICE).to(dtype).transpose(0, 1)
    found = attend_short(wide, rotary, cu_seqlens, heads, dout, max(lengths), scores)
    assert_plain_attention(found, wide, rotary, lengths, heads, dout, scores)


@pytest.mark.slow
@pytest.mark.parametrize("scores", [PLAIN, BIDIRECTIONAL])
def test_attention_kernels_are_bitwise_reproducible_and_sequences_are_independent(scores, short_attention):
    heads, lengths = (2, 1, 32), [5, 17, 9]
    wide, rotary, cu_seqlens = random_heads(*heads, torch.float16, DEVICE, lengths)
    dout = torch.randn(len(wide), heads[0], heads[2], device=DEVICE).half()

    def attend():
        return attend_short(wide, rotary, cu_seqlens, heads, dout, max(lengths), scores)

    first = attend()
    for one, other in zip(first, attend(), strict=True):
        assert torch.equal(one, other)
    wide[5:22], dout[5:22] = 9.0, 7.0
    for one, other in zip(first, attend(), strict=True):
        assert torch.equal(one[:5], other[:5])
        assert torch.equal(one[22:], other[22:])
        assert not torch.equal(one[5:22], other[5:22])


# The length of each sequence, and the one that it continues.
TREES = {
    "one prefix": ([21, 5, 9], [-1, 0, 0]),
    "two prefixes and others": ([3, 17, 4, 0, 40, 33, 2, 1, 0, 7], [-1, -1, 1, 1, 1, -1, 5, 5, -1, -1]),
    "a prefix longer than a block": ([70, 3, 66, 1], [-1, 0, 0, 0]),
    "a prefix that none continues": ([9, 4], [-1, -1]),
    "an empty prefix": ([0, 4, 20], [-1, 0, 0]),
}


def attend_tree(wide, rotary, tree, heads, dout, scores, max_len):
    """Outputs of sequences that continue others, and gradients of the parts of `wide`."""
    cu_seqlens = torch.tensor([0, *tree[0]]).cumsum(0).int()
    prefixes = Prefixes.of(cu_seqlens, torch.tensor(tree[1])).to(wide.device)
    parts = [part.requires_grad_() for part in wide.clone().split([heads[0], heads[1], heads[1]], dim=1)]
    out = sequence_attention_(*parts, cu_seqlens.to(wide.device), max_len, scores, rotary, prefixes=prefixes)
    return [out.detach(), *torch.autograd.grad(out, parts, dout)]


def attend_copies(wide, rotary, tree, heads, dout, scores):
    """The same in fp64 by plain attention, in which each sequence has a copy of what it continues."""
    begins = [sum(tree[0][:number]) for number in range(len(tree[0]))]
    rows = [list(range(begin, begin + length)) for begin, length in zip(begins, tree[0], strict=True)]
    copies = [(rows[at] if at >= 0 else []) + own for at, own in zip(tree[1], rows, strict=True)]
    ends = torch.tensor([0, *map(len, copies)]).cumsum(0).tolist()[1:]
    own = [row for end, mine in zip(ends, rows, strict=True) for row in range(end - len(mine), end)]
    index = [row for copy in copies for row in copy]
    parts = [part.cpu().double().requires_grad_() for part in wide.split([heads[0], heads[1], heads[1]], dim=1)]
    angles = [each.cpu()[index] for each in rotary]
    out = plain(*(part[index] for part in parts), angles, list(map(len, copies)), scores)[own]
    return [out.detach(), *torch.autograd.grad(out, parts, dout.cpu().double())]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("scores", [PLAIN, Scores(0.3, 4), Scores(softcap=2.0), Scores(0.5, 11, 1.5)])
def test_sequences_that_continue_others_attend_to_copies_of_them(tree, scores):
    heads = (6, 2, 10)
    wide, rotary, _ = random_heads(*heads, torch.float64, lengths=tree[0])
    dout = torch.randn(len(wide), heads[0], heads[2], dtype=torch.float64)
    found = attend_tree(wide, rotary, tree, heads, dout, scores, max(tree[0]))
    for one, other in zip(found, attend_copies(wide, rotary, tree, heads, dout, scores), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize(
    ("heads", "scores"),
    [((2, 2, 32), PLAIN), ((3, 1, 32), Scores(0.3, window=3)), ((2, 1, 64), Scores(window=25)), ((2, 1, 256), PLAIN)],
)
def test_attention_kernels_take_sequences_that_continue_others(
    dtype, heads, tree, scores, short_attention, poisoned_memory
):
    wide, rotary, _ = random_heads(*heads, dtype, DEVICE, tree[0])
    dout = torch.randn(len(wide), heads[0], heads[2], device=DEVICE).to(dtype)
    truth = attend_copies(wide, rotary, tree, heads, dout, scores)
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    found, again = twice(lambda: attend_tree(wide, rotary, tree, heads, dout, scores, max(tree[0])))
    in_longer_tiles = attend_tree(wide, rotary, tree, heads, dout, scores, 128)
    for one, other, third, true in zip(found, again, in_longer_tiles, truth, strict=True):
        assert torch.equal(one, other)
        for each in (one, third):
            assert (each.cpu().double() - true).norm() <= tolerance * true.norm()


def test_prefixes_without_causal_attention_are_refused():
    q = torch.randn(5, 2, 8)
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="Prefixes need causal attention"):
        sequence_attention_(q, q, q, starts, 3, BIDIRECTIONAL, prefixes=Prefixes.of(starts, torch.tensor([-1, 0])))


def test_angles_for_a_part_of_each_head_are_refused():
    q, angles = torch.randn(5, 2, 8), torch.ones(5, 4)
    with pytest.raises(ValueError, match="Got 4 angles of each row; expected 8"):
        sequence_attention_(q, q, q, torch.tensor([0, 5], dtype=torch.int32), 5, PLAIN, (angles, angles))


def test_a_window_without_causal_attention_is_refused():
    q = torch.randn(5, 2, 8)
    with pytest.raises(ValueError, match="A window of 3 needs causal attention"):
        sequence_attention_(q, q, q, torch.tensor([0, 5], dtype=torch.int32), 5, Scores(window=3, causal=False))


def weights_with_and_without_dropout(scores, dtype, device):
    """States whose outputs are the weights, since v is an identity per sequence; outputs with and without dropout."""
    wide, _, cu_seqlens = random_heads(4, 2, 64, dtype, device, [7, 0, 1, 50])
    q, k, _ = wide.split([4, 2, 2], dim=1)
    v = torch.cat([torch.eye(64)[:length] for length in (7, 0, 1, 50)])[:, None].expand(-1, 2, -1)
    states = [part.detach().clone().requires_grad_() for part in (q, k, v.to(device, dtype))]
    with torch.random.fork_rng(devices=[device] if device == "cuda" else []):
        torch.manual_seed(3)
        dropped = sequence_attention_(*states, cu_seqlens, 50, scores)
    return states, dropped, sequence_attention_(*states, cu_seqlens, 50, scores._replace(dropout=0.0))


def assert_weights_are_dropped(scores, dtype, device, tolerance):
    states, dropped, whole = weights_with_and_without_dropout(scores, dtype, device)
    is_there = whole > 1e-3
    kept = is_there & (dropped != 0)
    torch.testing.assert_close(dropped[kept], whole[kept] / (1 - scores.dropout), **tolerance)
    share, count = float(kept.sum() / is_there.sum()), int(is_there.sum())
    assert abs(share - (1 - scores.dropout)) <= 5 * (scores.dropout * (1 - scores.dropout) / count) ** 0.5
    # The gradients are those of the weights that were kept.
    dout = torch.randn_like(dropped)
    found = torch.autograd.grad(dropped, states, dout)
    exact = [state.detach().double().requires_grad_() for state in states]
    mask = torch.where(dropped != 0, 1 / (1 - scores.dropout), 0.0).double()
    expected = torch.autograd.grad(attend_with_mask(exact, mask, [7, 0, 1, 50], scores), exact, dout.double())
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= tolerance["rtol"] * other.norm()


def attend_with_mask(states, mask_AHE, lengths, scores):
    """Attention written out, with each weight times its element of a mask: [A, H, keys]."""
    q, k, v = states
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for q_L, k_L, v_L, mask_L in zip(*(x.split(lengths) for x in (q, k, v, mask_AHE)), strict=True):
        values = torch.einsum("ahe,bhe->hab", q_L, k_L) * q.shape[-1] ** -0.5
        positions = torch.arange(len(q_L), device=q.device)
        hidden = scores.causal & (positions[:, None] < positions[None])
        weights = values.masked_fill(hidden, -torch.inf).softmax(-1) * mask_L[..., : len(q_L)].transpose(0, 1)
        outputs.append(torch.einsum("hab,bhe->ahe", weights, v_L))
    return torch.cat(outputs)


@pytest.mark.parametrize("scores", [Scores(dropout=0.3), Scores(causal=False, dropout=0.1)])
def test_dropout_zeroes_the_given_share_of_weights_and_scales_the_others(scores):
    assert_weights_are_dropped(scores, torch.float64, "cpu", {"rtol": 1e-6, "atol": 1e-9})


def test_dropout_works_with_a_softcap():
    scores = Scores(softcap=2.0, dropout=0.4)
    _, dropped, whole = weights_with_and_without_dropout(scores, torch.float64, "cpu")
    is_there = whole > 0
    kept = is_there & (dropped != 0)
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.6)
    assert abs(float(kept.sum() / is_there.sum()) - 0.6) <= 5 * (0.24 / int(is_there.sum())) ** 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("scores", [Scores(), Scores(window=16), BIDIRECTIONAL])
@pytest.mark.parametrize(
    "heads", [(24, 8, 128), (16, 8, 128), (4, 4, 64), (12, 12, 64), (9, 3, 64), (4, 1, 256), (8, 1, 512), (8, 2, 512)]
)
@pytest.mark.parametrize("longest", [196, 128, 64, 29])
def test_attention_with_rotation_errs_no_more_than_torch_in_bf16(scores, heads, longest):
    lengths = [min(length, longest) for length in (57, 33, 196, 80, 0, 1, 100)]
    wide, rotary, cu_seqlens = random_heads(*heads, torch.bfloat16, "cuda", lengths)
    split = (heads[0], heads[1], heads[1])
    dout = torch.randn(sum(lengths), heads[0], heads[2], device="cuda", dtype=torch.bfloat16)

    def run(attend, dtype):
        parts = [part.to(dtype, copy=True).requires_grad_() for part in wide.split(split, dim=1)]
        out = attend([part.clone() for part in parts])
        return [out.detach(), *torch.autograd.grad(out, parts, dout.to(dtype))]

    truth = run(lambda parts: plain(*parts, rotary, lengths, scores), torch.float64)
    torchs = run(lambda parts: plain(*parts, rotary, lengths, scores), torch.bfloat16)
    ours = run(lambda parts: sequence_attention_(*parts, cu_seqlens, longest, scores, rotary), torch.bfloat16)
    for true, one, other in zip(truth, torchs, ours, strict=True):
        error, allowed = ((x.double() - true).norm() / true.norm() for x in (other, one))
        assert error <= 2 * allowed + 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(24, 8, 128), (12, 12, 64), (9, 3, 64)])
@pytest.mark.parametrize("rotates", [True, False])
def test_groups_of_heads_have_the_gradients_of_all_heads_at_once(heads, rotates):
    lengths = [57, 33, 196, 80, 0, 1, 300]
    wide, rotary, cu_seqlens = random_heads(*heads, torch.bfloat16, "cuda", lengths)
    dout = torch.randn(sum(lengths), heads[0], heads[2], device="cuda", dtype=torch.bfloat16)
    rotary = rotary if rotates else None

    def gradients(max_dq_bytes):
        parts = [part.clone().requires_grad_() for part in wide.split((heads[0], heads[1], heads[1]), dim=1)]
        # Copies, since q and k are rotated in place.
        out = sequence_attention_(*(part * 1 for part in parts), cu_seqlens, 300, Scores(), rotary, max_dq_bytes)
        return torch.autograd.grad(out, parts, dout)

    expected = gradients(None)
    dq, dk, dv = gradients(2**20)
    # dk and dv are summed in a fixed order.
    assert torch.equal(dk, expected[1])
    assert torch.equal(dv, expected[2])
    torch.testing.assert_close(dq, expected[0], rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(24, 8, 128), (9, 3, 64)])
def test_attention_of_short_sequences_runs_in_a_captured_graph_on_other_sequences(heads):
    lengths, others = [57, 33, 0, 128, 1, 0], [0, 100, 99, 5, 7, 8]
    wide, rotary, cu_seqlens = random_heads(*heads, torch.bfloat16, "cuda", lengths)
    dout = torch.randn(sum(lengths), heads[0], heads[2], device="cuda", dtype=torch.bfloat16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend_short(wide, rotary, cu_seqlens, heads, dout)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = attend_short(wide, rotary, cu_seqlens, heads, dout)
    torch.cuda.synchronize()
    new_wide, new_rotary, new_cu_seqlens = random_heads(*heads, torch.bfloat16, "cuda", others)
    for old, new in zip((wide, *rotary, cu_seqlens), (new_wide, *new_rotary, new_cu_seqlens), strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert_plain_attention(found, wide, rotary, others, heads, dout)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 1, 512), (8, 2, 512)])
def test_heads_too_large_for_flash_attention_attend_in_a_captured_graph(heads):
    lengths, others = [57, 33, 0, 200, 1, 0], [0, 100, 171, 5, 7, 8]
    wide, _, cu_seqlens = random_heads(*heads, torch.bfloat16, "cuda", lengths)
    dout = torch.randn(sum(lengths), heads[0], heads[2], device="cuda", dtype=torch.bfloat16)

    def run(dtype=torch.bfloat16):
        parts = [part.to(dtype).requires_grad_() for part in wide.split((heads[0], heads[1], heads[1]), dim=1)]
        out = sequence_attention_(*parts, cu_seqlens, 200, Scores(scale=0.1))
        return [out, *torch.autograd.grad(out, parts, dout.to(dtype))]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
    torch.cuda.synchronize()
    new_wide, _, new_cu_seqlens = random_heads(*heads, torch.bfloat16, "cuda", others)
    wide.copy_(new_wide)
    cu_seqlens.copy_(new_cu_seqlens)
    graph.replay()
    # In fp64 torch attends sequence by sequence.
    for one, exact in zip(found, run(torch.float64), strict=True):
        assert (one - exact).norm() <= 1e-2 * exact.norm()
