"""Write a synthetic base checkpoint and agents "RL-trained" from it, of any size, in bounded memory.

    python tools/make_checkpoint.py OUT --parameters 0.5B            OUT/base, OUT/agent-1, -2, -3
    python tools/make_checkpoint.py OUT --agents 8 --dtype f16 --clustered --shard-size 1GB

Names, shapes and config are those of a small Qwen2. Weights follow N(0, 0.02), norms stay near 1. Agents
move an element by one to four steps of the storage dtype, and which agents move it follows a profile: for
three agents the one published for Qwen2.5-7B-Instruct (code, tool, memory), for any other number an
independent one.

Every element is drawn on its own (a 16-bit random code looks up the weight, another the steps of all
agents), so nothing repeats for a compressor to profit from. Two details keep the profile exact under the
default epsilon of 1e-5: a step is never finer than one of bfloat16, and weights are drawn without the
innermost 8 % of the normal distribution, where such a step is smaller than epsilon.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

CODES = 1 << 16
CHUNK = 1 << 20
"""Elements generated and written at once."""
PUBLISHED = (26.4, 0.20, 18.8, 0.20, 25.8, 1.37, 25.7, 1.42)
"""Percent of elements by set of contributors, bit t for agent t: none, code, tool, code+tool, memory, .."""
INDEPENDENT = (0.032, 0.462, 0.543, 0.352, 0.170, 0.568)
"""Shares of changed elements of the published agents, dealt in turn to any number of agents."""
STEPS = np.array([1, 2, 3, 4], np.int8)
STEP_SHARES = (0.75, 0.17, 0.05, 0.03)
CLASSES = 32
FAVOURED = 0.6
"""Share of a clustered run's elements that follow the run's own contributors; the rest follow the profile."""


@dataclass(frozen=True)
class Format:
    """A floating-point format by its bits: sign, exponent, mantissa."""

    name: str
    torch: str
    bits: np.dtype
    mantissa: int
    bias: int
    largest: int  # magnitude bits of the largest finite value

    @property
    def step(self) -> int:
        """What one step adds to the bits: a step of bfloat16, or the format's own where that is coarser."""
        return 1 << max(0, self.mantissa - 7)


FORMATS = {
    "bf16": Format("BF16", "bfloat16", np.dtype("<u2"), 7, 127, 0x7F7F),
    "f16": Format("F16", "float16", np.dtype("<u2"), 10, 15, 0x7BFF),
    "f32": Format("F32", "float32", np.dtype("<u4"), 23, 127, 0x7F7FFFFF),
    "f64": Format("F64", "float64", np.dtype("<u8"), 52, 1023, 0x7FEFFFFFFFFFFFFF),
    "f8_e4m3": Format("F8_E4M3", "float8_e4m3fn", np.dtype("u1"), 3, 7, 0x7E),
    "f8_e5m2": Format("F8_E5M2", "float8_e5m2", np.dtype("u1"), 2, 15, 0x7B),
}
ALIASES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "f8": "f8_e4m3"}


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Recipe:
    """What to write; two equal recipes give the same bytes."""

    parameters: int
    agents: int = 3
    dtype: str = "bf16"
    shard_size: int = 5 * 10**9
    largest: int = 0  # bytes of one huge tensor, 0 for none
    tiny: int = 0  # number of tiny tensors, 0 for a transformer
    clustered: bool = False
    seed: int = 0

    @property
    def format(self) -> Format:
        return FORMATS[ALIASES.get(self.dtype.lower(), self.dtype.lower())]


# What the model looks like


def dimensions(recipe: Recipe) -> dict[str, int]:
    """Sizes of a Qwen2 with about `recipe.parameters` elements; the vocabulary takes up the remainder."""
    total, itemsize = recipe.parameters, recipe.format.bits.itemsize
    widths = (
        (2e6, 64),
        (2e7, 256),
        (2e8, 512),
        (1e9, 896),
        (3e9, 1536),
        (5e9, 2048),
        (2e10, 3584),
        (5e10, 5120),
    )
    hidden = next((width for limit, width in widths if total < limit), 8192)
    head = 16 if hidden < 512 else 64 if hidden < 3584 else 128
    heads = hidden // head
    kv_heads = next(heads // group for group in (7, 8, 4) if heads % group == 0)
    inner, kv = hidden * 21 // 4, kv_heads * head
    layer = 2 * hidden**2 + 2 * hidden * kv + 3 * hidden * inner + 3 * hidden + 2 * kv
    copies = 1 if recipe.largest else 2  # a forced huge embedding is tied, so that there is one of it
    vocabulary = -(-recipe.largest // (hidden * itemsize)) or max(16, total // (4 * copies * hidden))
    layers = max(1, round((total - copies * vocabulary * hidden) / layer))
    if not recipe.largest:
        vocabulary = max(16, (total - layers * layer - hidden) // (copies * hidden))
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "kv_size": kv,
    }


def transformer_tensors(recipe: Recipe) -> Iterator[Tensor]:
    """Tensors of a Qwen2, in the order of its modules."""
    size = dimensions(recipe)
    hidden, inner, kv, vocabulary = (
        size[key] for key in ("hidden_size", "intermediate_size", "kv_size", "vocab_size")
    )
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    for layer in range(size["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for letter, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield Tensor(f"{prefix}self_attn.{letter}_proj.weight", (rows, hidden))
            yield Tensor(f"{prefix}self_attn.{letter}_proj.bias", (rows,))
        yield Tensor(f"{prefix}self_attn.o_proj.weight", (hidden, hidden))
        yield Tensor(f"{prefix}mlp.gate_proj.weight", (inner, hidden))
        yield Tensor(f"{prefix}mlp.up_proj.weight", (inner, hidden))
        yield Tensor(f"{prefix}mlp.down_proj.weight", (hidden, inner))
        yield Tensor(f"{prefix}input_layernorm.weight", (hidden,))
        yield Tensor(f"{prefix}post_attention_layernorm.weight", (hidden,))
    yield Tensor("model.norm.weight", (hidden,))
    if not recipe.largest:
        yield Tensor("lm_head.weight", (vocabulary, hidden))


def tiny_tensors(recipe: Recipe) -> Iterator[Tensor]:
    """`recipe.tiny` tensors of 0, 1 or 2 dimensions, about `recipe.parameters` elements together."""
    mean = max(1, recipe.parameters // recipe.tiny)
    rng = np.random.default_rng((recipe.seed, 1))
    for number, size in enumerate(rng.integers(1, 2 * mean, recipe.tiny, endpoint=True).tolist()):
        shape = ((), (size,), (max(1, size // 8), 8))[number % 3]
        yield Tensor(f"model.layers.{number // 100}.adapters.{number % 100}.weight", shape)


def tensors(recipe: Recipe) -> list[Tensor]:
    return list(tiny_tensors(recipe) if recipe.tiny else transformer_tensors(recipe))


def shards(recipe: Recipe) -> dict[str, list[Tensor]]:
    """File names and their tensors, in order; a file exceeds the shard size only where one tensor does."""
    files: list[list[Tensor]] = []
    room = 0
    for tensor in tensors(recipe):
        nbytes = tensor.size * recipe.format.bits.itemsize
        if not files or nbytes > room:
            files.append([])
            room = recipe.shard_size
        files[-1].append(tensor)
        room -= nbytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": file for i, file in enumerate(files, 1)}


def header(file: list[Tensor], fmt: Format) -> tuple[bytes, list[int]]:
    """The bytes before a file's data, and where in the file each tensor starts."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = [], 0
    for tensor in file:
        starts.append(end)
        end += tensor.size * fmt.bits.itemsize
        entries[tensor.name] = {"dtype": fmt.name, "shape": tensor.shape, "data_offsets": [starts[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in starts]


# What the elements are


def nearest(values: np.ndarray, fmt: Format) -> np.ndarray:
    """Bits of the format nearest to positive float64 values, where it is finer than bfloat16 as coarse."""
    scale = np.float64(2.0) ** (min(fmt.mantissa, 7) - np.floor(np.log2(values)))
    rounded = np.rint(values * scale) / scale
    if fmt.bits.itemsize >= 4:
        return rounded.astype(f"<f{fmt.bits.itemsize}").view(fmt.bits)
    exponent = np.floor(np.log2(rounded)).astype(int)
    mantissa = np.rint((rounded / 2.0**exponent - 1) * (1 << fmt.mantissa)).astype(int)
    bits = ((exponent + fmt.bias) << fmt.mantissa) + mantissa
    return bits.clip(int(STEPS[-1]) + 1, fmt.largest - int(STEPS[-1])).astype(fmt.bits)


def weight_tables(fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Bits by 16-bit code: of a weight, and of a norm. In eight bits weights are scaled to deviation 1."""
    deviation, hole = (0.02, 2.0**-9) if fmt.bits.itemsize > 1 else (1.0, 2.0**-4)
    normal = NormalDist(0, deviation)
    low = normal.cdf(hole)
    half = (np.arange(CODES // 2) + 0.5) / (CODES // 2)
    sizes = nearest(np.array([normal.inv_cdf(low + (1 - low) * p) for p in half]), fmt)
    sign = fmt.bits.type(1 << (8 * fmt.bits.itemsize - 1))
    spread = NormalDist(1, 0.1)
    norms = nearest(np.array([spread.inv_cdf((code + 0.5) / CODES) for code in range(CODES)]), fmt)
    return np.concatenate([sizes, sizes | sign]), norms


def profile_masks(recipe: Recipe, rng: np.random.Generator) -> np.ndarray:
    """bool[T, codes]: which agents change the elements that draw a code."""
    if recipe.agents == 3:
        edges = np.cumsum(PUBLISHED) / sum(PUBLISHED)
        contributors = np.searchsorted(edges, (np.arange(CODES) + 0.5) / CODES)
        return np.array([contributors >> t & 1 for t in range(3)], bool)
    shares = [INDEPENDENT[t % len(INDEPENDENT)] for t in range(recipe.agents)]
    return np.array([rng.permutation(CODES) < share * CODES for share in shares])


def step_tables(recipe: Recipe, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """int8[classes, T, codes], the steps of each agent by code, and the classes' shares.

    Scattered data has one class, the profile itself.
    """
    masks, weights = [profile_masks(recipe, rng)], np.ones(1)
    if recipe.clustered:
        masks, weights = clustered_masks(masks[0], rng)
    tables = []
    for mask in masks:
        steps = rng.choice(STEPS, mask.shape, p=STEP_SHARES) * rng.choice(
            np.array([-1, 1], np.int8), mask.shape
        )
        tables.append(steps * mask)
    return np.array(tables), weights / weights.sum()


def clustered_masks(plain: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """A mask for every set of contributors (for up to 32 of them), and how often runs follow it."""
    sets, counts = np.unique(plain, axis=1, return_counts=True)
    if len(counts) > CLASSES:
        sets, counts = np.unique(plain[:, rng.integers(CODES, size=CLASSES)], axis=1, return_counts=True)
    masks = [np.where(rng.random(CODES) < FAVOURED, favourite[:, None], plain) for favourite in sets.T]
    return masks, counts.astype(float)


class Generator:
    """Draws the base's and the agents' bits of a tensor, chunk by chunk, the same for the same recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.weights, self.norms = weight_tables(recipe.format)
        self.steps, self.shares = step_tables(recipe, np.random.default_rng((recipe.seed, 2)))

    def chunks(self, tensor: Tensor, number: int) -> Iterator[tuple[int, list[np.ndarray]]]:
        """First element and bits, base first, of each chunk of the model's tensor `number`."""
        rng = np.random.Generator(np.random.SFC64([self.recipe.seed, 3, number]))
        for start, size, steps in self._runs(tensor, rng):
            base = self._base(tensor, size, rng)
            codes = rng.integers(CODES, size=size, dtype=np.uint16)
            yield start, [base, *(self._moved(base, table[codes]) for table in steps)]

    def _base(self, tensor: Tensor, size: int, rng: np.random.Generator) -> np.ndarray:
        fmt = self.recipe.format
        table = self.norms if "norm.weight" in tensor.name else self.weights
        bits = table[rng.integers(CODES, size=size, dtype=np.uint16)]
        if fmt.step > 1:
            bits |= rng.integers(fmt.step, size=size, dtype=fmt.bits)
        return bits

    def _moved(self, base: np.ndarray, steps: np.ndarray) -> np.ndarray:
        fmt = self.recipe.format
        if fmt.step > 1:
            steps = steps.astype(f"<i{fmt.bits.itemsize}") * fmt.step
        return np.add(base, steps, dtype=fmt.bits, casting="unsafe")

    def _runs(self, tensor: Tensor, rng: np.random.Generator) -> Iterator[tuple[int, int, np.ndarray]]:
        """Runs of elements that share a table: whole chunks, or when clustered 1 to 64 rows of one class."""
        row = tensor.shape[-1] if len(tensor.shape) > 1 else 64
        favourite = rng.choice(len(self.steps), p=self.shares)
        start = 0
        while start < tensor.size:
            size, kind = CHUNK, 0
            if self.recipe.clustered:
                size = min(CHUNK, row * int(rng.integers(1, 65)))
                kind = favourite if rng.random() < 0.3 else rng.choice(len(self.steps), p=self.shares)
            size = min(size, tensor.size - start)
            yield start, size, self.steps[kind]
            start += size


# Writing


def write(out: Path, recipe: Recipe) -> tuple[Path, list[Path]]:
    """Write OUT/base and OUT/agent-1 .. agent-T and return these folders."""
    folders = [out / "base", *(out / f"agent-{t}" for t in range(1, recipe.agents + 1))]
    generator = Generator(recipe)
    number = 0
    for folder in folders:
        folder.mkdir(parents=True)
        write_side_files(folder, recipe)
    for name, file in shards(recipe).items():
        write_shard([folder / name for folder in folders], file, number, generator)
        number += len(file)
    return folders[0], folders[1:]


def write_shard(paths: list[Path], file: list[Tensor], number: int, generator: Generator) -> None:
    """Write one shard of every checkpoint: headers first, then tensors in any order at their offsets."""
    fmt = generator.recipe.format
    head, starts = header(file, fmt)
    fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666) for path in paths]

    def fill(index: int) -> None:
        for first, sources in generator.chunks(file[index], number + index):
            for fd, bits in zip(fds, sources, strict=True):
                write_at(fd, memoryview(bits).cast("B"), starts[index] + first * fmt.bits.itemsize)

    try:
        for fd in fds:
            write_at(fd, memoryview(head), 0)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(fill, range(len(file))):
                pass
    finally:
        for fd in fds:
            os.close(fd)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def write_side_files(folder: Path, recipe: Recipe) -> None:
    """config.json, tokenizer files and, for a sharded model, the index."""
    write_json(folder / "config.json", config(recipe))
    pieces = ["<|endoftext|>", *(chr(code) for code in range(33, 127))]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    write_json(folder / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})
    write_json(folder / "generation_config.json", {"eos_token_id": 0, "do_sample": False})
    files = shards(recipe)
    if len(files) > 1:
        nbytes = sum(t.size for file in files.values() for t in file) * recipe.format.bits.itemsize
        weight_map = {t.name: name for name, file in files.items() for t in file}
        index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def config(recipe: Recipe) -> dict[str, object]:
    if recipe.tiny:
        return {"model_type": "tiny", "torch_dtype": recipe.format.torch}
    size = dimensions(recipe)
    del size["kv_size"]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **size,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": bool(recipe.largest),
        "torch_dtype": recipe.format.torch,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def number_with_unit(text: str) -> int:
    """'0.5B', '10M', '1GB', '4096': decimal units, an ending B after K, M, G, T ignored."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
    text = text.strip().upper()
    if len(text) > 2 and text[-1] == "B" and text[-2] in units:
        text = text[:-1]
    if text[-1:] in units:
        return round(float(text[:-1]) * units[text[-1]])
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to make; base and agent-N must not exist in it")
    parser.add_argument("--parameters", type=number_with_unit, default="0.5B", help="elements in all, 0.5B")
    parser.add_argument("--agents", type=int, default=3, help="number of agents, 3")
    parser.add_argument("--dtype", choices=sorted({*FORMATS, *ALIASES}), default="bf16")
    parser.add_argument("--shard-size", type=number_with_unit, default="5GB", help="bytes a file, 5GB")
    parser.add_argument(
        "--largest", type=number_with_unit, default=0, metavar="BYTES", help="one tensor so large"
    )
    parser.add_argument("--tiny", type=int, default=0, metavar="N", help="N tiny tensors, no transformer")
    pattern = parser.add_mutually_exclusive_group()
    pattern.add_argument("--scattered", action="store_true", help="changes independent per element (default)")
    pattern.add_argument("--clustered", action="store_true", help="changes cluster by row and tensor")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    out, _ = options.pop("out"), options.pop("scattered")
    recipe = Recipe(**options)
    base, agents = write(out, recipe)
    elements = sum(tensor.size for tensor in tensors(recipe))
    print(f"{base} and {len(agents)} agents: {elements:,} elements each, {len(shards(recipe))} file(s) each")


if __name__ == "__main__":
    main()
