"""The comparison is in a support module; a failed one shall show what differs."""

import pytest

pytest.register_assert_rewrite("contract_check")
