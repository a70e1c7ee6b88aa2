"""What every eviction policy must do, whatever its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from random import Random
from typing import Any

from deepinfer_core.components import Slot
from deepinfer_core.interfaces.eviction import Eviction, EvictionContext
from deepinfer_core.testing.contracts.base import Contract


class EvictionContract(Contract):
    """Laws of the slot ``eviction``."""

    slot = Slot.EVICTION

    def policy(self, keys: str = "") -> Eviction:
        """Return a new policy with entries; its clock advances by a second with every reading."""
        seconds = iter(range(10**9))
        built: Eviction = self.make(EvictionContext(clock=lambda: float(next(seconds))))
        for key in keys:
            built.add(key)
        return built

    @staticmethod
    def drain(policy: Eviction) -> list[Hashable]:
        """Ask for victims until there are none."""
        victims: list[Hashable] = []
        while (key := policy.victim()) is not None:
            victims.append(key)
            assert len(victims) < 1000, f"victims without an end: {victims[:5]} ..."
        return victims

    def test_every_entry_is_a_victim_once(self) -> None:
        """Asking again and again returns every unpinned entry exactly once, then None."""
        policy = self.policy("abcdef")
        assert sorted(map(str, self.drain(policy))) == list("abcdef")
        assert policy.victim() is None

    def test_an_empty_policy_has_no_victim(self) -> None:
        """``victim`` of nothing is None, and ``len`` is 0."""
        policy = self.policy()
        assert policy.victim() is None
        assert len(policy) == 0

    def test_pinned_entries_are_never_victims(self) -> None:
        """While pinned, an entry stays, however old it is."""
        policy = self.policy("abc")
        policy.pin("a")
        assert sorted(map(str, self.drain(policy))) == ["b", "c"]
        assert policy.victim() is None

    def test_pins_count(self) -> None:
        """An entry pinned twice is free only after two ``unpin``s."""
        policy = self.policy("a")
        policy.pin("a")
        policy.pin("a")
        policy.unpin("a")
        assert policy.victim() is None, "one of two pins is left"
        policy.unpin("a")
        assert policy.victim() == "a", "no pin is left"

    def test_len_counts_pinned_entries(self) -> None:
        """``len`` is the number of entries known, pinned or not."""
        policy = self.policy("abc")
        policy.pin("a")
        assert len(policy) == 3
        policy.victim()
        assert len(policy) == 2
        policy.remove("a")
        assert len(policy) == 1

    def test_removed_entries_are_gone(self) -> None:
        """After ``remove`` an entry is never a victim, and may be added anew without a pin."""
        policy = self.policy("abc")
        policy.pin("b")
        policy.remove("a")
        policy.remove("b")
        assert self.drain(policy) == ["c"]
        policy.add("b")
        assert policy.victim() == "b"

    def test_removing_an_unknown_entry_is_ignored(self) -> None:
        """``remove`` of a key never added, or removed before, changes nothing."""
        policy = self.policy("a")
        policy.remove("z")
        policy.remove("a")
        policy.remove("a")
        assert len(policy) == 0

    def test_a_victim_can_be_added_again(self) -> None:
        """A key that left as a victim is unknown and may come back."""
        policy = self.policy("ab")
        key = policy.victim()
        assert key is not None
        policy.add(key)
        assert len(policy) == 2
        assert sorted(map(str, self.drain(policy))) == ["a", "b"]

    def test_use_protects(self) -> None:
        """An entry in constant use outlives idle ones of the same cost and age."""
        for busy in "abcd":
            policy = self.policy("abcd")
            for _ in range(8):
                policy.touch(busy)
            victims = [policy.victim() for _ in range(3)]
            assert busy not in victims, f"{busy} is in constant use, but {victims} went"

    def test_the_order_is_reproducible(self) -> None:
        """Two policies that are told the same do the same."""
        assert self.history(seed=1) == self.history(seed=1)

    def test_any_history_agrees_with_a_set(self) -> None:
        """Random histories: victims are entries that are known and not pinned, none is lost."""
        for seed in range(30):
            self.history(seed)

    def history(self, seed: int, length: int = 200) -> list[Any]:
        """Run a random history against a plain model; return the victims."""
        random, policy = Random(seed), self.policy()
        known: set[int] = set()
        pins: Counter[int] = Counter()
        victims: list[Any] = []
        for _ in range(length):
            key = random.randrange(12)
            action = random.choice(("add", "touch", "pin", "unpin", "remove", "victim"))
            if action == "victim":
                found: Any = policy.victim()
                victims.append(found)
                idle = {entry for entry in known if not pins[entry]}
                assert (found in idle) if idle else (found is None), f"victim {found} of {idle}"
                known.discard(found)
            elif action == "add" and key not in known:
                policy.add(key, cost=random.randint(1, 100))
                known.add(key)
            elif action == "remove":
                policy.remove(key)
                known.discard(key)
                pins[key] = 0
            elif action == "touch" and key in known:
                policy.touch(key)
            elif action == "pin" and key in known:
                policy.pin(key)
                pins[key] += 1
            elif action == "unpin" and pins[key]:
                policy.unpin(key)
                pins[key] -= 1
            assert len(policy) == len(known), f"{len(policy)} entries, {len(known)} known"
        return victims
