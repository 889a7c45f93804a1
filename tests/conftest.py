"""Hypothesis profiles: the default is for every day; HYPOTHESIS_PROFILE=deep is for long runs."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("default", deadline=None, suppress_health_check=_quiet)
settings.register_profile("deep", deadline=None, suppress_health_check=_quiet, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
