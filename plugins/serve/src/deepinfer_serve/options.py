"""What a server may be told."""

from __future__ import annotations

import ipaddress

from attrs import field, frozen, validators

from deepinfer_core.errors import ConfigError
from deepinfer_core.typed import as_tuple, typed

MIB = 2**20


@frozen(kw_only=True, field_transformer=typed)
class ServeOptions:
    """Where a server listens, who may ask, and how much.

    Attributes:
        host: address to listen on.
        port: 0 takes a free one.
        api_keys: one of them must come with every request; none lets everybody ask.
        allow_without_key: listen to other machines though there is no key.
        origins: web pages of other origins that may ask, such as ``http://localhost:3000``.
        served_names: further names that clients may use for the model.
        max_body_bytes: largest request body.
        max_requests: requests that are answered at the same time; more get a 429.
        body_timeout_s: time a client has to send its body.
        write_timeout_s: a client that takes nothing for so long is given up.
        drain_timeout_s: time that running requests get after SIGTERM.
        response_ttl_s: how long a response can be continued or fetched.
        max_responses: responses kept at the same time; the oldest go first.
        max_responses_bytes: their size, all together.
    """

    host: str = "127.0.0.1"
    port: int = field(default=8000, validator=[validators.ge(0), validators.le(65535)])
    api_keys: tuple[str, ...] = field(default=(), converter=as_tuple, repr=False)
    allow_without_key: bool = False
    origins: tuple[str, ...] = field(default=(), converter=as_tuple)
    served_names: tuple[str, ...] = field(default=(), converter=as_tuple)
    max_body_bytes: int = field(default=8 * MIB, validator=validators.ge(1))
    max_requests: int = field(default=256, validator=validators.ge(1))
    body_timeout_s: float = field(default=30.0, validator=validators.gt(0))
    write_timeout_s: float = field(default=60.0, validator=validators.gt(0))
    drain_timeout_s: float = field(default=30.0, validator=validators.ge(0))
    response_ttl_s: float = field(default=86_400.0, validator=validators.gt(0))
    max_responses: int = field(default=4096, validator=validators.ge(0))
    max_responses_bytes: int = field(default=256 * MIB, validator=validators.ge(0))

    def check(self) -> None:
        """Refuse to open the door to other machines without a key, unless told to.

        Raises:
            ConfigError: the address is not of this machine alone, and there is no key; or a key is
                empty.
        """
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty; give one that cannot be guessed")
        if not (is_loopback(self.host) or self.api_keys or self.allow_without_key):
            raise ConfigError(
                f"{self.host} can be reached by other machines, and there is no API key",
                [
                    "give --api-key-file FILE (one key a line),",
                    "or stay on this machine with --host 127.0.0.1,",
                    "or say --allow-without-key if something else guards the port",
                ],
            )


def is_loopback(host: str) -> bool:
    """Whether an address or name reaches this machine only."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
