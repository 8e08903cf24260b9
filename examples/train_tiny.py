"""Trains the bundled demonstration model on a GPU from scratch: a byte-level BPE tokenizer and a small Llama.

    python examples/train_tiny.py --corpus DIR --out teacher-1 --seed 1 --shape 512,8,8,4,1408 --dropout 0.3 --epochs 12
    python examples/train_tiny.py --corpus DIR --out teacher-2 --seed 2 --shape 512,8,8,4,1408 --dropout 0.3 --epochs 12
    python examples/train_tiny.py --corpus DIR --out tiny --teachers teacher-1 teacher-2

A teacher is a larger network trained by the same command. Several can be trained at once, each on a GPU of its own
(--device cuda:1).

The --corpus folder holds `*.txt.xz` files of documents separated by a line `<|doc|>`. `heldout-*` files are only
scored. `dialogue-*` files hold "User: ..." / "Assistant: ..." paragraphs and are rendered with the chat template.

The corpus is small and trained on for many epochs, so overfitting limits the result. Three things reduce it: dropout, a
large learning rate with strong weight decay (Muon), and teachers, which are larger networks of the same kind whose mean
prediction the small network learns beside the text.

Shape letters: B windows in a batch, T tokens in a window, D hidden size, F intermediate size, H query heads,
K key/value heads, E size of one head, V vocabulary, N matrices of one shape.
"""

import argparse
import json
import lzma
import math
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

CONTEXT, VOCAB = 512, 8192  # T and V
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]  # ids 0 to 6
BOS, EOS, PAD, END = 0, 1, 2, 6
# Learning rate and weight decay (per unit of learning rate) of Muon for matrices and of AdamW for the rest; warm-up
# steps; weight of the teachers' predictions in the loss.
MUON_LR, MUON_DECAY, ADAM_LR, ADAM_DECAY, WARMUP, TEACHER_SHARE = 0.04, 0.15, 0.004, 0.05, 200, 0.8
# Exactly Llama 3's splitting rules, so that programs that know them (llama.cpp: "llama-bpe") can use the tokenizer.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|end|>' -}}
{%- endif -%}
{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"""


def read_documents(folder, pattern):
    """Return the documents, without surrounding newlines, of the files in `folder` that match `pattern`."""
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise SystemExit(f"no {pattern} in {folder}")
    texts = [lzma.decompress(file.read_bytes()).decode("utf-8") for file in files]
    documents = [part.strip("\n") for text in texts for part in re.split(r"^<\|doc\|>$", text, flags=re.MULTILINE)]
    return [document for document in documents if document]


def to_messages(dialogue):
    """Turn "User: ...\\n\\nAssistant: ..." into chat messages (list of {"role", "content"})."""
    parts = re.split(r"(?:^|\n\n)(User|Assistant): ", dialogue)[1:]
    return [{"role": role.lower(), "content": text.strip()} for role, text in zip(parts[::2], parts[1::2], strict=True)]


def train_tokenizer(texts, vocab_size):
    """Train a byte-level BPE of `vocab_size` tokens on `texts` and return it as a transformers tokenizer."""
    bpe = Tokenizer(models.BPE(ignore_merges=True))  # as in Llama 3, a word in the vocabulary is always one token
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    alphabet = to_bytes.alphabet()  # all 256 bytes, so no text has unknown tokens
    options = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    bpe.post_processor = processors.TemplateProcessing("<|bos|> $A", "<|bos|> $A $B:1", [("<|bos|>", BOS)])
    roles = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS], "pad_token": SPECIAL[PAD]}
    roles |= {"extra_special_tokens": SPECIAL[3:], "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **roles)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer, texts, add_bos=True):
    """Return one int64 tensor of token ids per text, with BOS in front if `add_bos`."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=add_bos)
    return [torch.tensor(encoding.ids) for encoding in encodings]


def linears(**sizes):
    """Return a ModuleDict of linear layers without bias, from their names and (in, out) sizes."""
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class Block(nn.Module):
    """One Llama layer; its parameters have transformers' names."""

    def __init__(self, config, dropout):
        super().__init__()
        d, e, f = config.hidden_size, config.head_dim, config.intermediate_size
        q, kv = config.num_attention_heads * e, config.num_key_value_heads * e
        self.head_dim, self.dropout = e, dropout
        self.input_layernorm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.self_attn = linears(q_proj=(d, q), k_proj=(d, kv), v_proj=(d, kv), o_proj=(q, d))
        self.post_attention_layernorm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.mlp = linears(gate_proj=(d, f), up_proj=(d, f), down_proj=(f, d))

    def forward(self, x, cos, sin):
        """x float32 [B, T, D] -> the same; cos, sin float32 [T, E/2]."""
        b, t, _ = x.shape
        attn, mlp = self.self_attn, self.mlp
        h = self.input_layernorm(x)
        q, k, v = (attn[n](h).view(b, t, -1, self.head_dim).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj"))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = attn["o_proj"](h.transpose(1, 2).reshape(b, t, -1))
        x = x + F.dropout(h, self.dropout, self.training)
        h = self.post_attention_layernorm(x)
        h = mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))
        return x + F.dropout(h, self.dropout, self.training)


def rotate(x, cos, sin):
    """Apply rotary embeddings to x [B, H, T, E], rotating its two halves as E/2 pairs; cos, sin [T, E/2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Llama(nn.Module):
    """LlamaForCausalLM with tied embeddings and with dropout, which transformers' class lacks.

    Dropout on the residual branches keeps dozens of epochs over a small corpus useful. The state dict loads into
    LlamaForCausalLM once the tied head is added.
    """

    def __init__(self, config, dropout):
        super().__init__()
        self.config, self.dropout = config, dropout
        self.model = nn.ModuleDict()
        self.model["embed_tokens"] = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model["layers"] = nn.ModuleList(Block(config, dropout) for _ in range(config.num_hidden_layers))
        self.model["norm"] = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        exponent = torch.arange(0, config.head_dim, 2) / config.head_dim
        angle = torch.arange(CONTEXT)[:, None] * config.rope_parameters["rope_theta"] ** -exponent  # [T, E/2]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if "embed" in name:  # rows of norm about 1, so that the tied head begins with logits of spread 1
                nn.init.normal_(p, std=config.hidden_size**-0.5)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):  # every layer begins as the identity
                nn.init.zeros_(p)
            elif p.ndim == 2:
                nn.init.normal_(p, std=(3 * p.shape[1]) ** -0.5)

    def forward(self, ids):
        """ids int64 [B, T] -> logits [B, T, V] in the compute dtype."""
        x = F.dropout(self.model["embed_tokens"](ids), self.dropout, self.training)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model["layers"]:
            x = layer(x, cos, sin)
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


def make_config(shape):
    """Return the LlamaConfig of `shape`, the string "D,layers,H,K,F"."""
    hidden, layers, heads, kv_heads, intermediate = map(int, shape.split(","))
    config = {"vocab_size": VOCAB, "tie_word_embeddings": True, "max_position_embeddings": CONTEXT}
    config |= {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-5}
    return transformers.LlamaConfig(**config, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)


def orthogonalise(g):
    """Push the singular values of g [N, rows, cols] towards 1 with five Newton-Schulz steps in bfloat16."""
    tall = g.shape[-2] > g.shape[-1]
    x = (g.mT if tall else g).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon:
    """Orthogonalised momentum for float32 matrices (K. Jordan 2024); matrices of one shape are updated together."""

    def __init__(self, params, momentum=0.95):
        self.momentum, self.orthogonalise = momentum, torch.compile(orthogonalise, dynamic=False)
        by_shape = {}
        for p in params:
            by_shape.setdefault(p.shape, []).append(p)
        self.groups = [(ps, torch.zeros((len(ps), *shape), device=ps[0].device)) for shape, ps in by_shape.items()]

    @torch.no_grad()
    def step(self, lr):
        """Update all matrices with learning rate `lr`; drop their gradients."""
        for params, average in self.groups:
            grad = torch.stack([p.grad for p in params])
            average.lerp_(grad, 1 - self.momentum)
            update = self.orthogonalise(grad.lerp_(average, self.momentum)).float()
            scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_mul_(params, 1 - lr * MUON_DECAY)
            torch._foreach_add_(params, list(update.unbind()), alpha=-lr * scale)
            for p in params:
                p.grad = None


def batches(documents, batch, generator, device):
    """Yield one epoch of int64 [B, T + 1] windows, from documents in a new order; neighbours overlap by one token."""
    order = torch.randperm(len(documents), generator=generator).tolist()
    stream = torch.cat([documents[i] for i in order]).to(device)
    offset = int(torch.randint(CONTEXT, (1,), generator=generator))
    windows = stream[offset:].unfold(0, CONTEXT + 1, CONTEXT)
    rows = torch.randperm(len(windows), generator=generator).to(device)
    for i in range(0, len(rows) - batch + 1, batch):
        yield windows[rows[i : i + batch]]


def train(model, documents, args, report, teachers):
    """Train `model` in place: bf16 autocast over fp32 weights, Muon and AdamW, linear decay of the learning rate to 0.

    documents: int64 ids of every document, with BOS and EOS. Training takes args.epochs, or args.minutes on a slow GPU,
    where the schedule follows the clock. report(model, epoch) is called every fourth epoch and at the end.
    With teachers, the loss is the cross-entropy against a mix of the next token and the mean of their distributions.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(args.seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=ADAM_DECAY)

    def teach(x):
        return sum(F.softmax(teacher(x).float(), dim=-1) for teacher in teachers) / len(teachers)

    def loss_of(x, y, soft):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(x)
        logits = logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, y.flatten())
        if soft is None:
            return loss
        return loss.lerp(-(soft.flatten(0, 1) * F.log_softmax(logits, dim=-1)).sum(-1).mean(), TEACHER_SHARE)

    teach, loss_of = torch.compile(teach, dynamic=False), torch.compile(loss_of, dynamic=False)
    per_epoch = (sum(map(len, documents)) - CONTEXT - 1) // CONTEXT // args.batch
    total, step, done, begun = max(1, int(args.epochs * per_epoch)), 0, 0.0, time.time()
    model.train()
    while done < 1:
        for window in batches(documents, args.batch, generator, device):
            done = max(step / total, (time.time() - begun) / (60 * args.minutes))
            if done >= 1:
                break
            rate = min(1.0, (step + 1) / WARMUP) * (1 - done)
            x, y, soft = window[:, :-1].contiguous(), window[:, 1:].contiguous(), None
            if teachers:
                with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
                    soft = teach(x)
            loss = loss_of(x, y, soft)
            loss.backward()
            adam.param_groups[0]["lr"] = ADAM_LR * rate
            muon.step(MUON_LR * rate)
            adam.step()
            adam.zero_grad()
            step += 1
            if step % 100 == 0:  # reading the loss waits for the GPU, so that the clock above is right
                print(f"step {step}/{total} loss {loss.item():.3f} {time.time() - begun:.0f} s", flush=True)
            if step % (4 * per_epoch) == 0:
                report(model, step / per_epoch)
    report(model, step / per_epoch)
    return model.eval()


@torch.no_grad()
def bits_per_byte(logits_of, tokenizer, texts, device, stride=CONTEXT):
    """Bits per UTF-8 byte of `texts`: the cost of every token after BOS (no EOS), each predicted exactly once.

    A document is cut into windows of T ids that begin `stride` ids apart; the first begins with BOS. Windows do not see
    each other: with stride T, the first prediction of a later window sees only one token, the last that the previous
    window predicted. With a smaller stride, a window counts only what the previous one did not predict.
    logits_of: int64 ids [B, T] -> logits [B, T, V].
    """
    rows, targets = [], []
    for ids in encode(tokenizer, texts):
        for start in range(0, max(1, len(ids) - 1 - CONTEXT + stride), stride):
            x, y = ids[start : start + CONTEXT], ids[start + 1 : start + CONTEXT + 1].clone()
            if start:
                y[: CONTEXT - stride] = -100
            x = x[: len(y)]
            rows.append(F.pad(x, (0, CONTEXT - len(x)), value=PAD))
            targets.append(F.pad(y, (0, CONTEXT - len(y)), value=-100))
    rows, targets, nats = torch.stack(rows), torch.stack(targets), 0.0
    for i in range(0, len(rows), 16):
        logits = logits_of(rows[i : i + 16].to(device)).flatten(0, 1).float()
        nats += F.cross_entropy(logits, targets[i : i + 16].flatten().to(device), reduction="sum").item()
    return nats / math.log(2) / sum(len(text.encode("utf-8")) for text in texts)


def save(model, tokenizer, out):
    """Write a folder that transformers loads: weights in bfloat16, tokenizer, generation settings."""
    hf = transformers.LlamaForCausalLM(model.config)
    hf.load_state_dict(model.state_dict() | {"lm_head.weight": model.model["embed_tokens"].weight})  # they are tied
    ends = {"bos_token_id": BOS, "eos_token_id": [EOS, END], "pad_token_id": PAD}  # an answer in a chat ends with END
    hf.generation_config = transformers.GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, **ends)
    hf.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    file = Path(out) / "tokenizer.json"  # half the size without indentation
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")), ensure_ascii=False, separators=(",", ":")), "utf-8")
    for file in Path(out).iterdir():
        file.chmod(0o644)


def load_teacher(folder, tokenizer, device):
    """Return the network that this script saved in `folder`, without dropout; `tokenizer` must be its own."""
    if transformers.AutoTokenizer.from_pretrained(folder).get_vocab() != tokenizer.get_vocab():
        raise SystemExit(f"{folder} was trained with another tokenizer; train it again on this corpus")
    teacher = Llama(transformers.LlamaConfig.from_pretrained(folder), dropout=0.0)
    teacher.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return teacher.to(device).eval().requires_grad_(False)


def parse_args():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    option = parser.add_argument
    option("--corpus", required=True, help="folder with the *.txt.xz files")
    option("--out", required=True, help="folder to write the model to")
    option("--teachers", nargs="*", default=[], metavar="DIR", help="folders of larger networks to distill")
    option("--seed", type=int, default=0, help="seed of the initial weights, the order of texts and dropout")
    option("--epochs", type=float, default=28)
    option("--minutes", type=float, default=60, help="time limit, by which the learning rate is zero")
    option("--shape", default="256,8,4,2,704", help="hidden size,layers,heads,key/value heads,intermediate size")
    option("--dropout", type=float, default=0.1)
    option("--batch", type=int, default=64, help=f"windows of {CONTEXT} tokens per step")
    option("--device", default="cuda")
    return parser.parse_args()


def main():
    """Train and save the model, then load it with transformers and score it."""
    args, start = parse_args(), time.time()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    prose = read_documents(args.corpus, "books-*.txt.xz") + read_documents(args.corpus, "docs-*.txt.xz")
    dialogues = [to_messages(text) for text in read_documents(args.corpus, "dialogue-*.txt.xz")]
    heldout = {name: read_documents(args.corpus, f"heldout-{name}.txt.xz") for name in ("books", "docs")}
    tokenizer = train_tokenizer(prose + [m["content"] for d in dialogues for m in d], VOCAB)
    chats = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in dialogues]
    eos = torch.tensor([EOS])
    documents = [torch.cat((ids, eos)) for ids in encode(tokenizer, prose) + encode(tokenizer, chats, add_bos=False)]
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens, {time.time() - start:.0f} s")

    def report(model, epoch):
        model.eval()
        with torch.autocast(device.type, torch.bfloat16):
            figures = [f"{name} {bits_per_byte(model, tokenizer, heldout[name], device):.4f}" for name in heldout]
        model.train()
        print(f"epoch {epoch:.1f}: bits per byte,", *figures, flush=True)

    teachers = [load_teacher(folder, tokenizer, device) for folder in args.teachers]
    model = Llama(make_config(args.shape), args.dropout).to(device)
    print(f"model: {sum(p.numel() for p in model.parameters())} parameters, {len(teachers)} teachers")
    train(model, documents, args, report, teachers)
    save(model, tokenizer, args.out)

    # The final figures are those of the saved model, rounded to bfloat16, loaded by transformers and run in float32.
    saved = transformers.AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.out)
    for name, texts in heldout.items():
        for stride in (CONTEXT, CONTEXT // 2):
            figure = bits_per_byte(lambda ids: saved(ids).logits, tokenizer, texts, device, stride)
            print(f"saved model, {name}: {figure:.4f} bits per byte, windows of {CONTEXT} every {stride} tokens")
    for prompt in ("The garden", "Today I learned how to"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        text = saved.generate(ids, max_new_tokens=80)[0]
        print("---", tokenizer.decode(text, skip_special_tokens=True))
    size = sum(file.stat().st_size for file in Path(args.out).iterdir())
    print(f"{size} bytes in {args.out}, {time.time() - start:.0f} s in all")


if __name__ == "__main__":
    main()
