"""Granite is a Llama with four factors. None of them needs an operation of its own.

    h = e embed(t);  h += r attention(norm(h));  h += r mlp(norm(h));  logits = head(norm(h)) / l

* The decoder keeps h / r instead of h. Then nothing is multiplied by r, because a norm of h / r is
  a norm of h whose epsilon is divided by the square of r. Embeddings are multiplied by e / r.
* Scores are multiplied by an `attention` factor instead of the root of the head's size. What they
  differ by is split between queries and keys, which the rotary embedding multiplies anyway.
* Rows are divided by l before the output head.
"""

import dataclasses
import math

from kunserve.model.spec import ModelSpec


def with_granite_scales(
    spec: ModelSpec, *, embedding: float, residual: float, attention: float, logits: float
) -> ModelSpec:
    """The model with Granite's four factors, all positive."""
    return dataclasses.replace(
        spec,
        embedding_scale=embedding / residual,
        rms_eps=spec.rms_eps / residual**2,
        attention_scale=attention * math.sqrt(spec.head_dim),
        logit_scale=1.0 / logits,
    )
