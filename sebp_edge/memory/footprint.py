"""Where the bytes of a training go, counted from the decoder's shape: what autograd keeps of each token, and the rest.

Of a block that runs on active rows this is what the code keeps, tensor by tensor; tests hold it against what autograd
really has. Of any other block it is every linear layer's input and output, and the hidden states around it. On a GPU,
our own norms and gates are made again in the backward pass, so what they give is not kept (`norms_and_mlps`), and our
own attention turns queries and keys in place (`attention`). Of a block in a checkpoint it is the input.

Shapes: A tokens, C loss rows, D hidden, Q and K queries' and keys' width, F the MLP's width, V vocabulary, R rank.
"""

from dataclasses import dataclass, fields
from functools import cached_property

from sebp_edge.memory.options import FASTEST, MAX_GRADIENTS_AT_ONCE, MemoryOptions
from sebp_edge.models.loading import NF4_BYTES
from sebp_edge.models.shape import Block, DecoderShape, Kind
from sebp_edge.ops.attention import sums_of
from sebp_edge.ops.backend import SHORT
from sebp_edge.patches.attention import FEW_SUMS
from sebp_edge.patches.mlp_pieces import ROWS
from sebp_edge.recipe import Recipe
from sebp_edge.rows.buckets import Bucket
from sebp_edge.texts.splits import NUM_FOLDS

FP32 = 4
# What cuBLAS keeps on each of the two streams of a training, from torch's allocator; on an H100, and less elsewhere.
CUBLAS_WORKSPACES = 2 * 32 * 2**20
# What the count may be wrong by. Weights on a GPU are only rounded up, each to whole pages. The host's heap also keeps
# what was freed: peaks on a CPU were measured 11 to 27 % of what comes and goes, or was there before, above the count.
RESERVE, RESERVE_OF_WEIGHTS, RESERVE_OF_HEAP = 0.04, 0.01, 0.3
# Pieces of torch's allocator that are free but too small, in the widest tensors of a micro-batch: graphs' pools of 3B
# models on an H100 held 2.9 more than their tensors (LoRA, 4,096 tokens), 2.9 (2,546, in checkpoints), 2.9 (4 bits).
WIDEST_IN_PIECES = 3
# And pieces of 20 MiB that are begun: on the two streams, and in the graphs' pool, whose number a small model gave.
BEGUN_PIECES = 4 * 20 * 2**20


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of a training, by what they are for.

    Attributes:
        weights: the base model's.
        adapter: fp32 masters and the copies that are computed with; in the host's memory also the states to go back to.
        gradients: their sums; on a GPU also one micro-batch's own, unless they come in pieces.
        optimizer: AdamW's two moments.
        activations: what the largest micro-batch keeps for its backward pass, and what that adds before it frees.
        loss: chunks of logits, hidden states and their gradient.
        graphs: what is held beside the largest run: cuBLAS' workspaces; pieces of torch's allocator that are free but
            too small; with folds the run of another graph.
        context: what the process holds outside torch's allocator.
        reserve: for what this count is wrong by.
    """

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    graphs: int
    context: int
    reserve: int

    @property
    def total(self) -> int:
        """The predicted peak."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Machinery:
    """How a training of one recipe runs on one device.

    Attributes:
        on_gpu: whether it is an NVIDIA GPU, with captured graphs.
        has_kernels: whether norms, gates and the loss run on our kernels.
        itemsize: bytes of one number of the base, and of activations.
        recipe: settled.
        options: what is held at once.
    """

    shape: DecoderShape
    recipe: Recipe
    on_gpu: bool
    has_kernels: bool
    itemsize: int
    options: MemoryOptions = FASTEST

    @property
    def is_lora(self) -> bool:
        return self.recipe.method == "lora"

    @property
    def updates_in_backward(self) -> bool:
        """Whether all weights are trained in bf16: moments take 8 bits, and gradients are not kept."""
        return not self.is_lora and self.itemsize == 2

    @property
    def has_8_bit_moments(self) -> bool:
        """Whether AdamW's moments take 8 bits each."""
        return self.updates_in_backward or self.options.moments_in_8_bits

    @property
    def computed_again(self) -> int:
        """Parameters that the backward pass multiplies by once more for its checkpoints.

        A block that runs again stops when it has all that it keeps: before its last layer's product.
        """
        number, again = self.options.checkpoints, 0
        for block in self.shape.blocks[:number]:
            again += block.parameters - block.mlp_out.size
        if self.options.blocks_in_pieces:
            for block in self.shape.blocks[number:]:
                again += sum(linear.size for linear in block.mlp_in)
        return again

    @property
    def offloaded_per_token(self) -> int:
        """Bytes of a token that go to the host's memory, and come back."""
        return self.itemsize * self.options.checkpoints * self.shape.hidden if self.options.offload else 0

    @property
    def is_hoisted(self) -> bool:
        """Whether active rows only are computed; the trial before the training has the last word."""
        return self.shape.is_hoisted

    def footprint(
        self, trained: list[Bucket], evaluated: list[Bucket], context: int, *, has_folds: bool = False
    ) -> Footprint:
        """The bytes of a training.

        Args:
            trained, evaluated: the sizes of its micro-batches, each once; what another one holds may be missing, but
                where graphs are held beside one another.
            context: what the process holds besides.
            has_folds: whether there are several trainings, whose later ones may need graphs beside the first one's, and
                all of whose best states are kept.
        """
        num_trained = self._num_trained
        steps = list(map(self._step, trained))
        # Held-out examples may be filled up to a bucket that was made for training.
        evaluations = [self._evaluation(sizes) for sizes in (*evaluated, *trained)] if evaluated else []
        (activations, loss), *others = sorted(steps + evaluations, key=sum, reverse=True)
        graphs = self._besides_tensors(max(trained)) if self.on_gpu else 0
        if self.on_gpu and self.is_hoisted and has_folds:
            graphs += max(map(sum, others), default=0)
        parts = {
            "weights": self._weights(),
            "adapter": self._adapter(has_folds),
            "gradients": self._gradients(),
            "optimizer": (2 if self.has_8_bit_moments else 2 * FP32) * num_trained,
            "activations": activations + self._dequantised(),
            "loss": loss,
            "graphs": graphs,
        }
        on_heap = 0 if self.on_gpu else parts["activations"] + loss
        certain = parts["weights"] if self.on_gpu else 0
        reserve = RESERVE * (sum(parts.values()) - on_heap - certain) + RESERVE_OF_WEIGHTS * certain
        reserve += 0 if self.on_gpu else RESERVE_OF_HEAP * (on_heap + context)
        return Footprint(**parts, context=context, reserve=int(reserve))

    def on_host(self, trained: list[Bucket], *, has_folds: bool = False) -> int:
        """Bytes of the host's memory that a training on a GPU holds, 0 of others.

        They are the states to go back to, one more while it takes the best one's place, and the blocks' inputs that
        wait there.
        """
        if not self.on_gpu:
            return 0
        state = self._num_trained * (FP32 if self.is_lora else self.itemsize)
        return (self._states(has_folds) + 1) * state + self.offloaded_per_token * max(sizes.tokens for sizes in trained)

    def kept(self, sizes: Bucket) -> int:
        """Bytes that autograd keeps of a micro-batch between forward and backward pass."""
        of_loss_row = self.shape.hidden if self.is_lora else 0  # its gradient, made along with the loss
        return sizes.tokens * self._kept_of_token + sizes.loss_rows * self.itemsize * of_loss_row

    # ------------------------------------------------------------------------------------------------- its own counts

    @property
    def _num_trained(self) -> int:
        return self.shape.adapter_parameters(self.recipe.r) if self.is_lora else self.shape.parameters

    @property
    def _inputs_on_device(self) -> int:
        """How many blocks' inputs are kept in checkpoints; of those in the host's memory one, the last."""
        return min(1, self.options.checkpoints) if self.options.offload else self.options.checkpoints

    @cached_property
    def _kept_of_token(self) -> int:
        shape = self.shape
        numbers, stats = self._inputs_on_device * shape.hidden, 0
        for block in shape.blocks[self.options.checkpoints :]:
            block_numbers, block_stats = self._kept_of_block(block)
            numbers, stats = numbers + block_numbers, stats + block_stats
        # Of the last norm its input; trained, also what the head reads. The rotary angles once for all blocks, or for
        # those with a window and those without.
        of_norm, in_fp32 = self._kept_of_norm(shape.blocks[-1].kind)
        final = shape.hidden * ((1 if self.is_lora else 2) + of_norm) + 4 * shape.head_size
        return self.itemsize * (numbers + final) + FP32 * (stats + in_fp32 * shape.hidden)

    @property
    def _has_flash_attention(self) -> bool:
        """Whether attention is one operation for all sequences; elsewhere it goes sequence by sequence."""
        return self.on_gpu and self.itemsize == 2

    def _attends_in_place(self, block: Block) -> bool:
        """Whether attention is one operation with its rotary embedding (see `OwnAttention`)."""
        return self._has_flash_attention and block.kind.attends_in_place

    def _has_own_norms(self, block: Block) -> bool:
        return self.has_kernels and block.kind.has_own_norms

    def _makes_norms_again(self, block: Block) -> bool:
        """Whether what its norms give is made again in the backward pass."""
        return self.is_lora and self._has_own_norms(block)

    def _has_own_mlp(self, block: Block) -> bool:
        return self.has_kernels and block.kind.has_own_mlp

    @property
    def _has_one_gradient(self) -> bool:
        """Whether embedding and head have one between them (see `TiedEmbedding`)."""
        return self.shape.is_tied and self.shape.embeds_plainly and self.is_hoisted

    def _weights(self) -> int:
        in_4bit = self.shape.linear_parameters if self.recipe.load_in_4bit else 0
        return int(self.itemsize * (self.shape.parameters - in_4bit) + NF4_BYTES * in_4bit)

    def _dequantised(self) -> int:
        """The largest matrix, while it is computed with; off a GPU it is made beside its place."""
        if not self.recipe.load_in_4bit:
            return 0
        return (
            (1 if self.on_gpu else 2)
            * self.itemsize
            * max(linear.size for block in self.shape.kinds for linear in block.linears.values())
        )

    def _besides_tensors(self, sizes: Bucket) -> int:
        """What cuBLAS keeps on two streams, and pieces that are too small for what comes.

        Of all weights' gradients the head's leaves a piece that is wide enough, unless it waits for the embedding's; if
        that is another one then, it finds none.
        """
        pieces = 0
        if self.is_hoisted:
            widest = max(self._widest(block, sizes) for block in self.shape.kinds)
            pieces = WIDEST_IN_PIECES * widest + max(self._passing(block, sizes.tokens) for block in self.shape.kinds)
        if not self.is_lora and not self.shape.is_tied:
            pieces = max(0, pieces - self.shape.head_parameters)
        if not self.is_lora and self.shape.is_tied and not self._has_one_gradient:
            pieces += self.shape.head_parameters
        return CUBLAS_WORKSPACES + BEGUN_PIECES + self.itemsize * pieces

    def _widest(self, block: Block, sizes: Bucket) -> int:
        """Numbers of the widest tensor: of gate and up, of queries, keys and values, or of logits."""
        attention = sizes.tokens * (block.queries + 2 * block.keys)
        return max(self._rows_of_mlps(sizes.tokens) * block.gate_and_up, attention, self._logits_at_once(sizes))

    def _passing(self, block: Block, tokens: int) -> int:
        """Numbers that a family's own code makes and frees where our operations make none: queries and keys by their
        cosines, by their sines and turned by half, and their sums; the activated gate and gradients of it and of gate
        and up."""
        of_attention = 0 if self._attends_in_place(block) else 4 * (block.queries + block.keys)
        if self._has_own_mlp(block):
            return tokens * of_attention
        of_mlp = block.gate_and_up + (block.wide if block.gate_and_up > block.wide else 0)
        return tokens * of_attention + self._rows_of_mlps(tokens) * of_mlp

    def _gradients(self) -> int:
        if self.updates_in_backward:
            return 0  # the largest, the head's, is counted with the loss
        # Gradients of small adaptations are all there before they are added up (see `Update.take_gradients`).
        in_pieces = self.options.in_pieces or FP32 * self._num_trained > MAX_GRADIENTS_AT_ONCE
        own = self.on_gpu and self.is_hoisted and not in_pieces
        return FP32 * self._num_trained * (2 if own else 1)

    def _states(self, has_folds: bool) -> int:
        """How many states of what is trained are kept: as it was and the best; with folds, the best of each as well."""
        return 2 + (NUM_FOLDS + (not self.is_lora) if has_folds else 0)

    def _adapter(self, has_folds: bool) -> int:
        """A frozen base's adapter and its copy in the base's dtype; states to go back to are in the host's memory."""
        snapshots = 0 if self.on_gpu else self._states(has_folds) * FP32
        return self._num_trained * ((FP32 + self.itemsize if self.is_lora else 0) + snapshots)

    def _step(self, sizes: Bucket) -> tuple[int, int]:
        """Activations and loss of a micro-batch with gradients, at the fullest of its moments.

        The loss and the head's gradient come first, beside all that is kept, then one block's backward pass after the
        other, and the embedding's gradient at last. By the time a block in a checkpoint runs again, others have freed
        what they kept. A head's gradient that is the embedding's too waits for that.
        """
        head = 0 if self.is_lora else self.itemsize * self.shape.head_parameters
        waiting = head if self.shape.is_tied else 0
        loss, kept = self._loss(sizes, with_gradients=True), self.kept(sizes)
        backward = max(self._backward_of(block, sizes) for block in self.shape.kinds)
        of_embedding = 0 if self._has_one_gradient else head
        moments = [kept + loss + head, kept + backward + waiting, waiting + of_embedding]
        if self.options.checkpoints:
            numbers, stats = map(max, zip(*map(self._kept_of_block, self.shape.kinds), strict=True))
            # While one is computed with, the next one comes from the host.
            inputs = self._inputs_on_device + self.options.offload
            again = self.itemsize * (inputs * self.shape.hidden + numbers) + FP32 * stats
            moments.append(sizes.tokens * again + backward + waiting)
        return max(moments) - loss - head, loss + head

    def _evaluation(self, sizes: Bucket) -> tuple[int, int]:
        """The same without gradients: one block's numbers at a time."""
        forward = max(self._backward_of(block, sizes) for block in self.shape.kinds)
        loss = self._loss(sizes, with_gradients=False)
        return max(0, forward - loss), loss

    def _rows_of_mlps(self, tokens: int) -> int:
        """How many rows go through an MLP at once."""
        return min(tokens, ROWS) if self.options.blocks_in_pieces else tokens

    def _kept_of_block(self, block: Block) -> tuple[int, int]:
        """What autograd keeps of one token in a block, of an MLP in pieces its input: numbers, and in fp32."""
        numbers, stats = self._kept_of(block)
        if self.options.blocks_in_pieces and block.kind is not None:
            has_input = not (self._makes_norms_again(block) and block.kind.norm_outputs)
            numbers += (0 if has_input else self.shape.hidden) - self._kept_of_mlp(block)
        return numbers, stats

    def _kept_of(self, block: Block) -> tuple[int, int]:
        """What autograd keeps of one token in a block whose MLP is whole: numbers of the base's dtype, and in fp32."""
        hidden, kind = self.shape.hidden, block.kind
        rank = self.recipe.r * len(block.linears) if self.is_lora else 0
        if kind is None:
            return sum(map(sum, block.linears.values())) + 4 * hidden + rank, 2
        numbers, stats = self._kept_of_norms(block)
        numbers += kind.reads * hidden + self._kept_of_attention(block) + self._kept_of_mlp(block)
        if self.is_lora:
            numbers += self.recipe.r * (len(kind.attention_in) + 1)
        return numbers, stats + block.queries // self.shape.head_size

    def _kept_of_norms(self, block: Block) -> tuple[int, int]:
        """What norms keep of one token beside what they read: numbers of the base's dtype, and in fp32."""
        hidden, kind = self.shape.hidden, block.kind
        of_heads = block.queries + block.keys if kind.has_head_norms else 0
        numbers, in_fp32 = (times * (kind.norms * hidden + of_heads) for times in self._kept_of_norm(kind))
        numbers += 0 if self._makes_norms_again(block) else kind.norm_outputs * hidden
        return numbers, in_fp32 + (2 if kind.has_layer_norms else 1) * kind.norms + of_heads // self.shape.head_size

    def _kept_of_norm(self, kind: Kind | None) -> tuple[int, int]:
        """What a norm keeps beside what it reads, in times what that is: numbers of the base's dtype, and in fp32."""
        if kind is None or kind.has_layer_norms or (self.has_kernels and kind.has_own_norms):
            return 0, 0
        trained = 0 if self.is_lora else 1  # x̂, for the norm's own gradient
        if kind.has_own_norms and self.itemsize == FP32:
            return trained, 0
        # In place of what it reads, that in fp32: as it is, and less its mean.
        return -1, 2 + trained

    def _kept_of_attention(self, block: Block) -> int:
        """Queries, keys, values and what attention makes of them, of one token."""
        kind, turned = block.kind, block.queries + block.keys
        numbers = 2 * block.queries + 2 * block.keys
        if self._attends_in_place(block):
            # Before their norms and after.
            return numbers + (turned if kind.has_head_norms else 0)
        # What is turned is another tensor. What it was made of lies beside the values, or is what a norm read.
        lies_beside = self.is_lora or len(kind.attention_in) == 1
        if kind.has_rotary and (lies_beside or kind.has_head_norms):
            numbers += turned
        # Elsewhere there are outputs of each sequence, and side by side.
        return numbers + (0 if self._has_flash_attention else block.queries)

    def _kept_of_mlp(self, block: Block) -> int:
        """What an MLP keeps of one token beside its input."""
        kind, own = block.kind, self._has_own_mlp(block)
        numbers = block.gate_and_up + (self.recipe.r * (len(kind.mlp_in) + 1) if self.is_lora else 0)
        if not (own and self.is_lora):
            numbers += block.wide  # what the last layer reads
        if not own and block.gate_and_up > block.wide:
            numbers += block.wide  # the activated gate
        return numbers

    def _backward_of(self, block: Block, sizes: Bucket) -> int:
        """Bytes that a block's backward pass holds at once beside what is kept."""
        if block.kind is None:
            widest = max(map(max, block.linears.values()), default=0)
            return self.itemsize * sizes.tokens * (3 * widest + 2 * self.shape.hidden)
        return max(self._backward_of_mlp(block, sizes.tokens), self._backward_of_attention(block, sizes))

    def _backward_of_mlp(self, block: Block, tokens: int) -> int:
        hidden, kind = self.shape.hidden, block.kind
        # Of gate and up, and of what the last layer read; in a family's own code that takes the place of what was kept.
        of_row = block.gate_and_up + (block.wide if self._has_own_mlp(block) else 0)
        if not self.options.blocks_in_pieces:
            # With the hidden states, before and after each norm behind attention and MLP; and of a weight.
            of_states = (2 + kind.norms - kind.norm_outputs) * hidden
            return self.itemsize * (tokens * (of_row + of_states) + (0 if self.is_lora else block.mlp_out.size))
        # A piece's own numbers, and what pieces give until it is together: gradients of x, and of all weights, one of
        # which is there twice while it is added up.
        numbers = self._rows_of_mlps(tokens) * (of_row + self._kept_of_mlp(block)) + tokens * 3 * hidden
        return self.itemsize * (numbers + (0 if self.is_lora else 4 * block.mlp_out.size))

    def _backward_of_attention(self, block: Block, sizes: Bucket) -> int:
        """On a GPU: dout, dq, dk and dv before and after they are turned back; of sequences that are not short also dk
        and dv of each head, copies of a turn's out and dout, and sums; less what the MLP kept. Elsewhere it goes
        sequence by sequence."""
        if not self._has_flash_attention:
            return 0
        queries, keys, size = block.queries, block.keys, self.shape.head_size
        sums = sums_of(sizes.tokens, queries // size, size, sizes.sequences) if sizes.longest > SHORT else 0
        turns, freed = 1, self._kept_of_mlp(block)
        if self.options.blocks_in_pieces:
            freed = 0
            if self._attends_in_place(block):
                turns = min(max(1, -(-sums // FEW_SUMS)), keys // size)
        of_turn = queries + 2 * keys + (2 * queries if sums else 0) + (2 * queries if turns > 1 else 0)
        numbers = self.shape.hidden + 2 * queries + 2 * keys - freed
        return int(sizes.tokens * self.itemsize * (numbers + of_turn / turns) + sums / turns)

    def _loss(self, sizes: Bucket, *, with_gradients: bool) -> int:
        """A chunk of logits, whose gradients overwrite them; without our kernels a softmax besides."""
        rows, hidden = sizes.loss_rows, self.shape.hidden
        numbers = (1 if self.has_kernels else 2) * self._logits_at_once(sizes) + 2 * rows * hidden
        if with_gradients and not self.is_lora:
            numbers += rows * hidden
        return self.itemsize * numbers

    def _logits_at_once(self, sizes: Bucket) -> int:
        vocabulary = self.shape.vocabulary
        return vocabulary * min(sizes.loss_rows, max(1, self.options.max_logits // vocabulary))
