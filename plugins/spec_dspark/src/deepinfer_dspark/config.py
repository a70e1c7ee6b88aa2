"""Options of the plugin's components; light, so that a configuration is checked without torch."""

from __future__ import annotations

from attrs import field, frozen, validators

from deepinfer_core.typed import typed

_NOT_NEGATIVE = validators.ge(0)
_SHARE = validators.and_(validators.ge(0.0), validators.le(1.0))

COSTS = "~/.cache/deepinfer/step-costs"
"""Where measured step times are kept unless something else is said."""


@frozen(kw_only=True, field_transformer=typed)
class DsparkConfig:
    """Options of drafter ``dspark``.

    Attributes:
        checkpoint: folder of a draft model in either form; "" = the layers for drafts that the
            target carries itself, else the model that comes with the plugin for it.
        block_size: most drafts of a pass; 0 = what the draft model was trained for.
        replay_tokens: positions that are computed again after a prefix was found in the cache, so
            that drafts have something to go by; 0 = none.
        calibrate_every: judged blocks after which confidences are calibrated again by what became
            of the last thousand; 0 = never.
    """

    checkpoint: str = ""
    block_size: int = field(default=0, validator=_NOT_NEGATIVE)
    replay_tokens: int = field(default=64, validator=_NOT_NEGATIVE)
    calibrate_every: int = field(default=256, validator=_NOT_NEGATIVE)


@frozen(kw_only=True, field_transformer=typed)
class Mtp1Config:
    """Options of drafter ``mtp1``: the first draft of a model like ``dspark``'s, one a round.

    Attributes:
        checkpoint: folder of a draft model in either form; "" = the layers for drafts that the
            target carries itself, else the model that comes with the plugin.
        replay_tokens: as in ``DsparkConfig``.
    """

    checkpoint: str = ""
    replay_tokens: int = field(default=64, validator=_NOT_NEGATIVE)


@frozen(kw_only=True, field_transformer=typed)
class NgramConfig:
    """Options of drafter ``ngram``: what followed the last tokens where they stood before.

    Attributes:
        longest: tokens matched at first.
        shortest: tokens matched at least.
        max_drafts: most drafts of a proposal; 0 = as many as the engine allows.
        confidence: probability of acceptance that is reported for a match of ``shortest`` tokens;
            each further token halves the doubt.
    """

    longest: int = field(default=4, validator=validators.ge(1))
    shortest: int = field(default=2, validator=validators.ge(1))
    max_drafts: int = field(default=0, validator=_NOT_NEGATIVE)
    confidence: float = field(default=0.5, validator=_SHARE)

    @shortest.validator
    def _check_order(self, attribute: object, value: int) -> None:
        if value > self.longest:
            raise ValueError(f"'shortest' ({value}) exceeds 'longest' ({self.longest})")


@frozen(kw_only=True, field_transformer=typed)
class RecorderConfig:
    """Options of drafter ``recorder``, which drafts nothing and keeps data to train on.

    Attributes:
        folder: where features of texts are kept.
        layers: target layers whose output is kept, as a draft model reads them.
    """

    folder: str = "features"
    layers: tuple[int, ...] = (8, 19, 28)


@frozen(kw_only=True, field_transformer=typed)
class ThresholdConfig:
    """Options of budget ``threshold``.

    Attributes:
        least: leading drafts are verified as long as each one's confidence reaches this.
    """

    least: float = field(default=0.5, validator=_SHARE)


@frozen(kw_only=True, field_transformer=typed)
class StepwiseConfig:
    """Options of budget ``stepwise``: admit while the next draft raises tokens per second.

    Attributes:
        cost_folder: where measured step times are kept between runs; "" = nowhere.
    """

    cost_folder: str = COSTS


@frozen(kw_only=True, field_transformer=typed)
class LaggedConfig:
    """Options of budget ``lagged``.

    Attributes:
        margin: a total must promise this share more tokens per second than no drafts at all;
            otherwise none is verified.
        cost_folder: where measured step times are kept between runs; "" = nowhere.
    """

    margin: float = field(default=0.0, validator=_SHARE)
    cost_folder: str = COSTS
