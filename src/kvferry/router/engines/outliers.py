"""Engines that do far worse than the others of their role are left out for a while. Pure: times and figures come in."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import msgspec

from kvferry.errors import ConfigError


class OutlierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    enabled: bool = True
    error_gap: float = 0.3
    """An error rate so far above the others' median is far."""
    slow_factor: float = 4.0
    """A mean time so many times the others' is far: prompts differ, engines with equal work do not by so much."""
    slow_gap_s: float = 0.25
    """And never less than this: at milliseconds a ratio says nothing."""
    volume: int = 20
    """An engine with fewer requests in the window is not judged, nor compared with."""
    window_s: float = 30.0
    eject_s: float = 30.0
    """Times how often it was ejected lately; each such time without another takes one off."""
    eject_max_s: float = 300.0

    def check(self) -> None:
        """Raises `ConfigError`."""
        if self.eject_s <= 0 or self.window_s <= 0 or self.slow_factor <= 1 or self.volume < 1:
            raise ConfigError("outliers: times and volume must be above 0, slow_factor above 1")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine, over the window. `timed` of the good ones took `seconds` in all."""

    good: float
    bad: float
    seconds: float = 0.0
    timed: float = 0.0

    @property
    def error_rate(self) -> float:
        return self.bad / (self.good + self.bad)


class _Record(msgspec.Struct):
    times: int
    until: float


class Outliers:
    """Of one role."""

    def __init__(self, settings: OutlierSettings) -> None:
        self._settings = settings
        self._records: dict[str, _Record] = {}

    def ejected_for(self, url: str, now: float) -> float:
        """Seconds that this engine is left out for yet; 0: it isn't."""
        record = self._records.get(url)
        return max(0.0, record.until - now) if record is not None else 0.0

    def judge(self, now: float, samples: Mapping[str, Sample]) -> dict[str, str]:
        """`samples`: of all engines of the role that could take requests, the ejected ones included. The engines that
        are ejected now, with the reason; at no time more than half of those given, the worst first."""
        if not self._settings.enabled:
            return {}
        out = sum(self.ejected_for(url, now) > 0 for url in samples)
        far = []
        judged = {url: sample for url, sample in samples.items() if self._counts(url, sample, now)}
        for url, sample in judged.items():
            reason, by = self._far(sample, [other for name, other in judged.items() if name != url])
            if reason:
                far.append((-by, url, reason))
        fresh = {url: reason for _, url, reason in sorted(far)[: max(0, len(samples) // 2 - out)]}
        for url in fresh:
            self._eject(url, now)
        return fresh

    def forget(self, url: str) -> None:
        self._records.pop(url, None)

    def _counts(self, url: str, sample: Sample, now: float) -> bool:
        return sample.good + sample.bad >= self._settings.volume and not self.ejected_for(url, now)

    def _far(self, sample: Sample, others: list[Sample]) -> tuple[str, float]:
        """Why, and how far on a scale on which 1 is just far enough; "" if it isn't."""
        if not others:
            return "", 0.0
        usual = median(other.error_rate for other in others)
        if sample.error_rate - usual > self._settings.error_gap:
            text = f"{sample.error_rate:.0%} of its requests failed, of others' {usual:.0%}"
            return text, (sample.error_rate - usual) / self._settings.error_gap
        means = [other.seconds / other.timed for other in others if other.timed >= self._settings.volume]
        if means and sample.timed >= self._settings.volume:
            mean, usual = sample.seconds / sample.timed, median(means)
            limit = max(usual * self._settings.slow_factor, usual + self._settings.slow_gap_s)
            if mean > limit:
                return f"it took {mean:.2f} s on average, others {usual:.2f} s", mean / limit
        return "", 0.0

    def _eject(self, url: str, now: float) -> None:
        settings = self._settings
        record = self._records.setdefault(url, _Record(0, now))
        earned = int((now - record.until) / settings.eject_s)
        record.times = max(0, record.times - earned) + 1
        record.until = now + min(settings.eject_max_s, settings.eject_s * record.times)
