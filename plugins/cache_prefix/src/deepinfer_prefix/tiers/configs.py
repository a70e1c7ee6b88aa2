"""Options of the stores; light, so that a configuration is checked without their libraries."""

from __future__ import annotations

from attrs import field, frozen, validators

from deepinfer_core.typed import typed

_POSITIVE = validators.gt(0)
_POSITIVE_S = validators.gt(0.0)
_NOT_NEGATIVE_S = validators.ge(0.0)
_SHARE = validators.and_(validators.ge(0.0), validators.le(1.0))

EXPIRE_AFTER_S = 259200.0
"""72 hours."""


@frozen(kw_only=True, field_transformer=typed)
class HostConfig:
    """Options of store ``host``.

    Attributes:
        quota_bytes: memory for pages, at most.
        expire_after_s: seconds after its last access from which on a page is not there; 0 = never.
        retain_s: seconds after it was put during which a page is not evicted.
        retain_share: share of the quota that retained pages may hold; beyond it pages are kept
            without that protection.
    """

    quota_bytes: int = field(default=1 << 30, validator=_POSITIVE)
    expire_after_s: float = field(default=EXPIRE_AFTER_S, validator=_NOT_NEGATIVE_S)
    retain_s: float = field(default=0.0, validator=_NOT_NEGATIVE_S)
    retain_share: float = field(default=0.5, validator=_SHARE)


@frozen(kw_only=True, field_transformer=typed)
class DiskConfig:
    """Options of store ``disk``.

    Attributes:
        directory: folder of the files; "" = ``kv`` in the user's cache folder. On a local disk:
            another machine must not write there.
        quota_bytes: bytes of segments, at most.
        segment_bytes: size at which a segment is sealed.
        bucket_s: pages that expire within the same so many seconds share segments, which are
            removed together; a page in use is written again when it leaves its bucket.
        expire_after_s: as in ``host``.
        retain_s: as in ``host``.
        retain_share: as in ``host``.
        remember_s: seconds for which a page that is gone can be explained.
        read_only: only read, even if no other process writes.
    """

    directory: str = ""
    quota_bytes: int = field(default=16 << 30, validator=_POSITIVE)
    segment_bytes: int = field(default=64 << 20, validator=_POSITIVE)
    bucket_s: float = field(default=3600.0, validator=_POSITIVE_S)
    expire_after_s: float = field(default=EXPIRE_AFTER_S, validator=_NOT_NEGATIVE_S)
    retain_s: float = field(default=0.0, validator=_NOT_NEGATIVE_S)
    retain_share: float = field(default=0.5, validator=_SHARE)
    remember_s: float = field(default=86400.0, validator=_NOT_NEGATIVE_S)
    read_only: bool = False


@frozen(kw_only=True, field_transformer=typed)
class TieredConfig:
    """Options of store ``tiered``: host memory in front of a disk.

    Attributes:
        host: options of the first.
        disk: options of the second.
    """

    host: HostConfig = field(factory=HostConfig)
    disk: DiskConfig = field(factory=DiskConfig)
