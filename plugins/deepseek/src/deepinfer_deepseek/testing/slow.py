"""V4.1 once more, from its description alone: numpy, float64, one sequence, no cache, no batch.

Nothing of the plugin is used, and nothing is shared with it but the names of tensors and of fields
of config.json. Every row looks at lists of vectors of all earlier rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class SlowV41:
    """The model.

    Args:
        config: a flat config.json.
        weights: tensors by name.
        engram_ids: compressed id of every token, or nothing without Engram.
        keep: last rows of the prompt that the decoder computes, 0 = all.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Array],
        engram_ids: Sequence[int] = (),
        keep: int = 0,
    ) -> None:
        self.c, self.engram_ids, self.keep = config, list(engram_ids), keep
        self.w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.eps = config.get("rms_norm_eps", 1e-20)
        ratios = config["compress_ratios"][: config["num_hidden_layers"]]
        self.ratios, self.boundary = ratios, ratios.index(1)

    def logits(
        self, tokens: Sequence[int], num_prompt: int | None = None, start: int = 0, hit: int = 0
    ) -> Array:
        """[n, vocab]: of every row from ``start`` on; rows that the decoder drops are NaN.

        Args:
            tokens: the sequence.
            num_prompt: how many of them are the prompt; None = all.
            start: windows hold nothing below this position.
            hit: entries that end at or below it are those of a run from the beginning.
        """
        cold = self._run(tokens, 0, {}, 0) if start else None
        entries = {} if cold is None else cold
        prompt = len(tokens) if num_prompt is None else num_prompt
        cut = max(0, prompt - self.keep) if self.keep else 0
        self._out = np.full((len(tokens), self.c["vocab_size"]), np.nan)
        self._run(tokens, start, entries, hit, cut, self._out)
        return self._out

    def _run(
        self,
        tokens: Sequence[int],
        start: int,
        cold: dict[int, Any],
        hit: int,
        cut: int = 0,
        out: Array | None = None,
    ) -> dict[int, Any]:
        c, w = self.c, self.w
        copies = c.get("hc_mult", 4)
        n = len(tokens)
        streams = {p: np.tile(w["embed.weight"][tokens[p]], (copies, 1)) for p in range(start, n)}
        pre = {p: np.eye(copies)[0] for p in streams}
        entries: dict[int, dict[int, tuple[Array, Array]]] = {}
        lists: dict[int, dict[int, list[int]]] = {}
        allowed: dict[int, set[int]] = {}
        self.seen: dict[int, dict[int, Array]] = {}
        for layer, ratio in enumerate(self.ratios):
            base = f"layers.{layer}."
            if layer in c["engram_layer_ids"]:
                streams = {p: self._engram(layer, x, tokens, p) for p, x in streams.items()}
            self.seen[layer] = {p: x.mean(0) for p, x in streams.items()}
            inputs = {
                p: self._rms(pre[p] @ streams[p], w[f"{base}attn_norm.weight"]) for p in streams
            }
            if layer in c["kv_source_layer_ids"]:
                entries[layer] = self._entries(layer, ratio, inputs, cold.get(layer, {}), hit)
            if layer == self.boundary:
                streams = {p: x for p, x in streams.items() if p >= cut}
            lowest = max(start, cut) if layer >= self.boundary else start
            windows = {p: self._window_key(layer, ratio, inputs[p], p) for p in streams}
            for p in streams:
                x = inputs[p]
                mix_pre, post, carry = self._mix(f"{base}hc_attn", streams[p])
                q_low = self._rms(w[f"{base}attn.wq_a.weight"] @ x, w[f"{base}attn.q_norm.weight"])
                first = max(lowest, p - c["sliding_window"] + 1)
                keys = [windows[t] for t in range(first, p + 1)]
                if ratio:
                    owner = max(s for s in c["kv_source_layer_ids"] if s <= layer)
                    ranker = max(s for s in c["index_source_layer_ids"] if s <= layer)
                    if ranker == layer:
                        chosen = self._rank(layer, ratio, x, q_low, p, entries[owner], allowed)
                        lists.setdefault(layer, {})[p] = chosen
                    keys += [entries[owner][j][0] for j in lists[ranker][p]]
                y = self._attend(layer, ratio, q_low, keys, p)
                streams[p] = post[:, None] * y + carry.T @ streams[p]
                mid = self._rms(mix_pre @ streams[p], w[f"{base}ffn_norm.weight"])
                pre[p], post, carry = self._mix(f"{base}hc_ffn", streams[p])
                y = self._experts(f"{base}ffn.", mid)
                streams[p] = post[:, None] * y + carry.T @ streams[p]
        if out is not None:
            for p, stream in streams.items():
                out[p] = w["head.weight"] @ self._rms(pre[p] @ stream, w["norm.weight"])
        return entries

    def drafts(self, tokens: Sequence[int], num_prompt: int) -> tuple[list[int], list[float]]:
        """The likeliest drafts after the last token, and the logits of their confidences.

        Args:
            tokens: the sequence; the last one is the anchor.
            num_prompt: how many of them are the prompt.
        """
        c, w = self.c, self.w
        self.logits(tokens[:-1], num_prompt=min(num_prompt, len(tokens) - 1))
        targets, anchor = c["dspark_target_layer_ids"], len(tokens) - 1
        past = [p for p in self.seen[targets[0]] if anchor - c["sliding_window"] <= p < anchor]
        past = [p for p in past if all(p in self.seen[layer] for layer in targets)]
        features = {
            p: self._rms(
                w["mtp.0.main_proj.weight"] @ np.concatenate([self.seen[x][p] for x in targets]),
                w["mtp.0.main_norm.weight"],
            )
            for p in past
        }
        size, copies = c["dspark_block_size"], c.get("hc_mult", 4)
        ids = [tokens[-1]] + [c["dspark_noise_token_id"]] * (size - 1)
        streams = [np.tile(w["embed.weight"][token], (copies, 1)) for token in ids]
        pre = [np.eye(copies)[0]] * size
        drafts = c["num_nextn_predict_layers"]
        chosen = self.c["num_experts_per_tok"]
        for layer in range(drafts):
            base = f"mtp.{layer}."
            keys = [self._window_key(layer, 0, features[p], p, base) for p in past]
            inputs = [
                self._rms(a @ x, w[f"{base}attn_norm.weight"])
                for a, x in zip(pre, streams, strict=True)
            ]
            keys += [self._window_key(layer, 0, x, anchor + i, base) for i, x in enumerate(inputs)]
            for i, x in enumerate(inputs):
                mix_pre, post, carry = self._mix(f"{base}hc_attn", streams[i])
                q = self._rms(w[f"{base}attn.wq_a.weight"] @ x, w[f"{base}attn.q_norm.weight"])
                y = self._attend(layer, 0, q, keys, anchor + i, base)
                streams[i] = post[:, None] * y + carry.T @ streams[i]
                mid = self._rms(mix_pre @ streams[i], w[f"{base}ffn_norm.weight"])
                pre[i], post, carry = self._mix(f"{base}hc_ffn", streams[i])
                self.c = {**c, "num_experts_per_tok": c.get("dspark_num_experts_per_tok", chosen)}
                y = self._experts(f"{base}ffn.", mid)
                self.c = c
                streams[i] = post[:, None] * y + carry.T @ streams[i]
        last, previous = f"mtp.{drafts - 1}.", tokens[-1]
        found, sure = [], []
        for i in range(size):
            hidden = pre[i] @ streams[i]
            markov = w[f"{last}markov_head.embed.weight"][previous]
            logits = w["head.weight"] @ self._rms(hidden, w[f"{last}norm.weight"])
            logits = logits + w[f"{last}markov_head.head.weight"] @ markov
            seen = np.concatenate([hidden, markov])
            sure.append(float(w[f"{last}confidence_head.proj.weight"][0] @ seen))
            previous = int(logits.argmax())
            found.append(previous)
        return found, sure

    # ------------------------------------------------------------------------------ pieces

    def _rms(self, x: Array, weight: Array) -> Array:
        return weight * x / np.sqrt(np.mean(x * x) + self.eps)

    def _mix(self, base: str, stream: Array) -> tuple[Array, Array, Array]:
        copies, eps = len(stream), self.c.get("hc_eps", 1e-6)
        flat = stream.reshape(-1)
        m = self.w[f"{base}_fn"] @ flat / np.sqrt(np.mean(flat * flat) + self.eps)
        a, b, d = self.w[f"{base}_scale"]
        bias = self.w[f"{base}_base"]
        pre = 1 / (1 + np.exp(-(m[:copies] * a + bias[:copies]))) + eps
        two = slice(copies, 2 * copies)
        post = 2 / (1 + np.exp(-(m[two] * b + bias[two])))
        square = (m[2 * copies :] * d + bias[2 * copies :]).reshape(copies, copies)
        c = np.exp(square - square.max(1, keepdims=True))
        c = c / c.sum(1, keepdims=True) + eps
        c = c / (c.sum(0, keepdims=True) + eps)
        for _ in range(self.c.get("hc_sinkhorn_iters", 20) - 1):
            c = c / (c.sum(1, keepdims=True) + eps)
            c = c / (c.sum(0, keepdims=True) + eps)
        return pre, post, c

    def _angles(self, ratio: int, p: int) -> Array:
        dim = self.c["qk_rope_head_dim"]
        theta = self.c["compress_rope_theta"] if ratio else self.c["rope_theta"]
        f = theta ** (-np.arange(0, dim, 2) / dim)
        if ratio:
            yarn = self.c["rope_scaling"]
            original = yarn["original_max_position_embeddings"]

            def corr(turns: float) -> float:
                return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

            low = max(math.floor(corr(yarn["beta_fast"])), 0)
            high = min(math.ceil(corr(yarn["beta_slow"])), dim - 1)
            ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
            f = f / yarn["factor"] * ramp + f * (1 - ramp)
        angles: Array = p * f
        return angles

    def _turn(self, x: Array, ratio: int, p: int, sign: int = 1) -> Array:
        dim = self.c["qk_rope_head_dim"]
        turned = np.array(x, copy=True)
        pairs = turned[..., -dim::2] + 1j * turned[..., -dim + 1 :: 2]
        pairs = pairs * np.exp(1j * sign * self._angles(ratio, p))
        turned[..., -dim::2], turned[..., -dim + 1 :: 2] = pairs.real, pairs.imag
        return turned

    def _window_key(
        self, layer: int, ratio: int, x: Array, p: int, base: str | None = None
    ) -> Array:
        base = f"{base or f'layers.{layer}.'}attn."
        kv = self._rms(self.w[f"{base}wkv.weight"] @ x, self.w[f"{base}kv_norm.weight"])
        return self._turn(kv, ratio, p)

    def _entries(
        self, layer: int, ratio: int, inputs: dict[int, Array], cold: dict[int, Any], hit: int
    ) -> dict[int, tuple[Array, Array]]:
        base, w = f"layers.{layer}.attn.", self.w
        found: dict[int, tuple[Array, Array]] = {}
        for j in range((max(inputs) + 1) // ratio):
            if (j + 1) * ratio <= hit:
                found[j] = cold[j]
                continue
            group = [inputs[j * ratio + i] for i in range(ratio)]
            values = np.stack([w[f"{base}compressor.wkv.weight"] @ x for x in group])
            if ratio > 1:
                gates = np.stack([w[f"{base}compressor.wgate.weight"] @ x for x in group])
                shares = np.exp(gates - gates.max(0))
                values = values * shares / shares.sum(0)
            latent = self._rms(values.sum(0), w[f"{base}compressor.norm.weight"])
            key = self._rms(
                w[f"{base}indexer.wk.weight"] @ latent, w[f"{base}indexer.k_norm.weight"]
            )
            found[j] = (
                self._turn(latent, ratio, j * ratio),
                self._turn(key, ratio, j * ratio),
            )
        return found

    def _rank(
        self,
        layer: int,
        ratio: int,
        x: Array,
        q_low: Array,
        p: int,
        entries: dict[int, tuple[Array, Array]],
        allowed: dict[int, set[int]],
    ) -> list[int]:
        c, base = self.c, f"layers.{layer}.attn.indexer."
        q = (self.w[f"{base}wq_b.weight"] @ q_low).reshape(c["index_n_heads"], -1)
        q = self._turn(q, ratio, p)
        weights = self.w[f"{base}weights_proj.weight"] @ x
        weights = weights / math.sqrt(c["index_head_dim"] * c["index_n_heads"])
        visible = (p + 1) // ratio
        score = {j: float(weights @ np.maximum(q @ entries[j][1], 0)) for j in range(visible)}
        source = c.get("candidate_source_layer_id")
        if source is not None and layer > source:
            score = {j: s for j, s in score.items() if j in allowed[p]}
        if layer == source:
            size = c["candidate_block_size"]
            blocks: dict[int, float] = {}
            for j, s in score.items():
                blocks[j // size] = max(blocks.get(j // size, -math.inf), s)
            blocks[(visible - 1) // size] = math.inf
            best = sorted(blocks, key=lambda b: (-blocks[b], b))[: c["candidate_topk_blocks"]]
            allowed[p] = {b * size + i for b in best for i in range(size)}
        return sorted(score, key=lambda j: (-score[j], j))[: c["index_topk"]]

    def _attend(
        self,
        layer: int,
        ratio: int,
        q_low: Array,
        keys: list[Array],
        p: int,
        base: str | None = None,
    ) -> Array:
        c, base = self.c, f"{base or f'layers.{layer}.'}attn."
        heads, dim = c["num_attention_heads"], c["head_dim"]
        q = self._turn((self.w[f"{base}wq_b.weight"] @ q_low).reshape(heads, dim), ratio, p)
        out = np.zeros((heads, dim))
        for h, sink in enumerate(self.w[f"{base}attn_sink"]):
            scores = [float(q[h] @ k) / math.sqrt(dim) for k in keys]
            top = max([*scores, sink])
            shares = [math.exp(s - top) for s in scores]
            total = sum(shares) + math.exp(sink - top)
            for share, k in zip(shares, keys, strict=True):
                out[h] += share / total * k
        out = self._turn(out, ratio, p, -1)
        groups = c["o_groups"]
        lows = [
            part @ out.reshape(groups, -1)[g]
            for g, part in enumerate(np.split(self.w[f"{base}wo_a.weight"], groups))
        ]
        result: Array = self.w[f"{base}wo_b.weight"] @ np.concatenate(lows)
        return result

    def _experts(self, base: str, x: Array) -> Array:
        c, w = self.c, self.w
        logits = w[f"{base}gate.weight"] @ x / c.get("gate_temp", 1.0)
        scores = np.sqrt(np.logaddexp(0, logits))
        biased = scores + w[f"{base}gate.bias"]
        chosen = sorted(range(len(scores)), key=lambda e: (-biased[e], e))
        chosen = chosen[: c["num_experts_per_tok"]]
        total = sum(scores[e] for e in chosen) + 1e-20
        y = self._expert(f"{base}shared_experts.", x, 1.0)
        for e in chosen:
            share = scores[e] / total * c.get("routed_scaling_factor", 1.5)
            y = y + self._expert(f"{base}experts.{e}.", x, share)
        return y

    def _expert(self, base: str, x: Array, share: float) -> Array:
        limit = self.c.get("swiglu_limit", 10.0)
        gate = np.minimum(self.w[f"{base}w1.weight"] @ x, limit)
        up = np.clip(self.w[f"{base}w3.weight"] @ x, -limit, limit)
        result: Array = self.w[f"{base}w2.weight"] @ (gate / (1 + np.exp(-gate)) * up * share)
        return result

    def _engram(self, layer: int, stream: Array, tokens: Sequence[int], p: int) -> Array:
        c, base = self.c, f"layers.{layer}.engram."
        longest, heads = c.get("engram_max_ngram_size", 4), c["engram_n_heads"]
        vocab = c["engram_compressed_vocab_size"]
        bound = max(1, (2**63 - 1) // vocab // 2)
        random = np.random.default_rng(10007 * layer)
        factors = (random.integers(0, bound, size=longest, dtype=np.int64) * 2 + 1).tolist()
        seen: set[int] = set()
        tables: list[int] = []
        for number in c["engram_layer_ids"]:
            tables = []
            for _ in range(longest - 1):
                at = c["engram_vocab_size"] - 1
                while len(tables) % heads or not tables or len(tables) // heads <= _:
                    at += 1
                    prime = at > 1 and all(at % d for d in range(2, math.isqrt(at) + 1))
                    if prime and at not in seen:
                        seen.add(at)
                        tables.append(at)
            if number == layer:
                break
        pad = self.engram_ids[c.get("engram_pad_token_id", 2)]
        near = [self.engram_ids[tokens[p - s]] if p >= s else pad for s in range(longest)]
        mixed, rows = near[0] * factors[0], []
        for n in range(1, longest):
            mixed ^= near[n] * factors[n]
            for h in range(heads):
                at = (n - 1) * heads + h
                rows.append(mixed % tables[at] + sum(tables[:at]))
        found = np.concatenate([self.w[f"{base}embed.weight"][row] for row in rows])
        *keys, value = np.split(self.w[f"{base}wkv.weight"] @ found, len(stream) + 1)
        result = np.array(stream, copy=True)
        for i, (x, key) in enumerate(zip(stream, keys, strict=True)):
            qk = self.w[f"{base}q_weight"][i] * self.w[f"{base}k_weight"][i]
            norm = math.sqrt(np.mean(x * x) + self.eps) * math.sqrt(np.mean(key * key) + self.eps)
            dot = float(np.sum(x * qk * key)) / norm / math.sqrt(len(x))
            gate = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot) if dot else 0.0
            result[i] = x + value / (1 + math.exp(-gate))
        return result
