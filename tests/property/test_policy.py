"""Policies over any engines and asks: able engines only, one if there is one, the same again; the least is least."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.choice.ask import Ask
from kvferry.router.choice.policy import POLICIES, TOPOLOGY_FACTOR, Policy, Snapshot, choose, eligible

URLS = [f"http://e{number}" for number in range(6)]
MODELS = st.sampled_from(["x", "y", "z"])
RACKS = st.sampled_from(["", "r1", "r2"])
TOKENS = st.integers(0, 100_000)


@st.composite
def engines(draw: st.DrawFn) -> list[Snapshot]:
    urls = draw(st.lists(st.sampled_from(URLS), unique=True))
    return [
        Snapshot(
            url=url,
            ready=draw(st.booleans()),
            models=draw(st.none() | st.frozensets(MODELS)),
            in_flight=draw(st.integers(0, 50)),
            tokens=draw(TOKENS),
            matched=draw(TOKENS),
            sticky=draw(st.booleans()),
            topology=draw(RACKS),
        )
        for url in urls
    ]


ASKS = st.builds(
    Ask,
    model=st.none() | MODELS,
    tokens=TOKENS,
    session=st.sampled_from(["", "s"]),
    avoid=st.frozensets(st.sampled_from(URLS)),
    topology=RACKS,
)
ANY = st.sampled_from(POLICIES)
TURNS = st.integers(0, 1 << 40)


@given(ANY, engines(), ASKS, TURNS)
def test_one_that_can_take_it_if_there_is_one(policy: Policy, found: list[Snapshot], ask: Ask, turn: int) -> None:
    chosen = choose(policy, found, ask, turn)
    able = eligible(found, ask)
    assert (chosen is None) == (not able)
    if chosen is not None:
        assert chosen in able and chosen.ready and chosen.url not in ask.avoid and chosen.serves(ask.model)


@given(ANY, engines(), ASKS, TURNS)
def test_the_same_again(policy: Policy, found: list[Snapshot], ask: Ask, turn: int) -> None:
    assert choose(policy, found, ask, turn) == choose(policy, list(found), ask, turn)


@given(engines(), ASKS, TURNS)
def test_least_loaded_is_least_and_prefix_aware_has_fewest_to_go(found: list[Snapshot], ask: Ask, turn: int) -> None:
    anywhere = Ask(model=ask.model, tokens=ask.tokens, session=ask.session, avoid=ask.avoid)
    able = eligible(found, anywhere)
    if not able:
        return
    least = choose("least_loaded", found, anywhere, turn)
    assert least is not None and least.tokens == min(engine.tokens for engine in able)
    assert least.in_flight == min(engine.in_flight for engine in able if engine.tokens == least.tokens)
    fewest = choose("prefix_aware", found, anywhere, turn)

    def to_go(engine: Snapshot) -> int:
        return engine.tokens + max(0, ask.tokens - engine.matched)

    assert fewest is not None and to_go(fewest) == min(map(to_go, able))
    sticky = choose("session", found, anywhere, turn)
    last = [engine for engine in able if engine.sticky] if ask.session else []
    assert sticky is not None and (sticky in last if last else sticky == fewest)


@given(engines(), ASKS, TURNS)
def test_power_of_two_takes_no_worse_than_the_second_worst(found: list[Snapshot], ask: Ask, turn: int) -> None:
    anywhere = Ask(model=ask.model, avoid=ask.avoid)
    able = eligible(found, anywhere)
    if len(able) > 1:
        chosen = choose("power_of_two", found, anywhere, turn)
        assert chosen is not None and chosen.tokens <= sorted(engine.tokens for engine in able)[-2]


@given(engines(), ASKS, TURNS)
def test_the_same_rack_first_unless_it_is_much_busier(found: list[Snapshot], ask: Ask, turn: int) -> None:
    able = eligible(found, ask)
    near = [engine for engine in able if ask.topology and engine.topology == ask.topology]
    far = [engine for engine in able if engine not in near]
    if not near or not far:
        return
    chosen = choose("least_loaded", found, ask, turn)
    best, other = min(engine.tokens for engine in near), min(engine.tokens for engine in far)
    assert chosen is not None and (chosen in near) == (best <= TOPOLOGY_FACTOR * (other + ask.tokens))


@given(st.integers(1, 6), st.integers(0, 1000))
def test_idle_engines_take_turns(count: int, start: int) -> None:
    found = [Snapshot(url=url, ready=True) for url in URLS[:count]]
    for policy in ("round_robin", "least_loaded", "prefix_aware", "session"):
        chosen = [choose(policy, found, Ask(), start + turn) for turn in range(count)]
        assert {one.url for one in chosen if one} == set(URLS[:count])


def test_random_and_power_of_two_reach_all_alike() -> None:
    found = [Snapshot(url=url, ready=True) for url in URLS]
    for policy in ("random", "power_of_two"):
        count = dict.fromkeys(URLS, 0)
        for turn in range(6000):
            chosen = choose(policy, found, Ask(), turn)
            assert chosen is not None
            count[chosen.url] += 1
        assert min(count.values()) > 850 and max(count.values()) < 1150, (policy, count)
