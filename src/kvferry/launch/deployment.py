"""One deployment: engines and router as processes of this one, from a `DeploymentSpec`.

    with Deployment(DeploymentSpec(mode="push")) as d:
        ask(d.router_url)

One thread owns it. Leaving the `with` block, however that happens, leaves no process, port or file in /dev/shm; if
the owner is killed, the watchdog does the same.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from kvferry.errors import ConfigError, EngineError, LaunchError
from kvferry.launch import engine as engines
from kvferry.launch import model as models
from kvferry.launch import rendering
from kvferry.launch.cancel import Cancel
from kvferry.launch.engine import Engine
from kvferry.launch.guard import Guard
from kvferry.launch.ports import LOOPBACK, Ports
from kvferry.launch.process import ManagedProcess
from kvferry.launch.readiness import wait_healthy, warm_up
from kvferry.launch.rendering import RENDER
from kvferry.launch.router_arguments import check_router_arguments
from kvferry.launch.routing import router_command
from kvferry.launch.spec import DeploymentSpec, served_name
from kvferry.launch.state import Phase, State, StateDir, process_state
from kvferry.launch.tree import end_trees, members, start_time

ROUTER = "router"


class RunningEngine:
    """One engine of a deployment, as tests and the benchmark see it."""

    def __init__(self, plan: Engine, process: ManagedProcess, auth_key_file: Path) -> None:
        self.plan = plan
        self.auth_key_file = auth_key_file
        self.process = process
        self.name = plan.name
        self.role = plan.role
        self.url = plan.url
        self.side_channel = plan.side_channel
        self.engine_id = plan.engine_id
        self.log = process.log

    @property
    def pid(self) -> int:
        return self.process.pid

    def pids(self) -> list[int]:
        """All its processes: the API server, the engine core, workers."""
        return [process.pid for process in members([self.process.tree])]


class Deployment:
    def __init__(
        self, spec: DeploymentSpec, *, report: Callable[[str], None] = lambda line: None, cancel: Cancel | None = None
    ) -> None:
        self.mode = spec.check()
        check_router_arguments(spec, self.mode)
        self._own_state_dir = "" if spec.state_dir else tempfile.mkdtemp(prefix="kvferry-run-")
        self.state_dir = StateDir(Path(spec.state_dir or self._own_state_dir))
        self.spec = replace(spec, state_dir=self.state_dir.path)
        self.engines: list[RunningEngine] = []
        self.router: ManagedProcess | None = None
        self.router_url = ""
        self.render: ManagedProcess | None = None
        self.render_url = ""
        self.start_s: dict[str, float] = {}
        self._report = report
        self._cancel = cancel or Cancel()
        self._ports = Ports()
        self._guard: Guard | None = None
        self.started = False
        """Whether any process was started; stays so after `stop`."""
        self._is_ready = False
        self._scratch = Path()

    # -- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        if kind is None and self._own_state_dir:
            shutil.rmtree(self._own_state_dir, ignore_errors=True)

    def start(self) -> None:
        """Start everything and return when it answers. On any failure nothing is left running."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self.state_dir.acquire()
        router_port = 0
        if self.spec.router:
            router_port = self._ports.named(self.spec.port, "router") if self.spec.port else self._ports.free()
            self.router_url = f"http://{LOOPBACK}:{router_port}"
        model = Path()
        if self.spec.engine == "vllm":
            model = models.prepare(self.spec.model_or_default, report=self._report, cancel=self._cancel)
        self._cancel.check()
        self.state_dir.clear_run()  # not before: a port in use or a missing model leaves the last run's files alone
        self._guard = Guard()
        self._scratch = Path(tempfile.mkdtemp(prefix="kvferry-"))
        self._guard.remove_later(str(self._scratch))
        self._guard.remove_later(str(self.state_dir.state))
        plans = self._plan()
        peers = [plan.side_channel for plan in plans if plan.role == "prefill"]
        for plan in plans:
            argv = engines.command(self.spec, self.mode, plan, model, peers)
            env = engines.environment(self.spec, self.mode, plan, self._scratch)
            process = ManagedProcess(plan.name, argv, env, self.state_dir.logs / f"{plan.name}.log", self._guard)
            self.engines.append(RunningEngine(plan, process, self.state_dir.auth_key))
        if self.spec.render:
            self._make_render(model)
        if self.spec.router:
            argv = router_command(self.spec, plans, self.mode, router_port, self.state_dir, self.render_url)
            env = {**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.env}
            self.router = ManagedProcess(ROUTER, argv, env, self.state_dir.logs / "router.log", self._guard)
        for engine in self.engines:
            self._cancel.check()
            self.started = True
            engine.process.start()
            self._write_state("starting")
        if self.render:
            self._cancel.check()
            self.render.start()
            self._write_state("starting")
        self.wait_ready([engine.name for engine in self.engines] + ([RENDER] if self.render else []))
        if self.router:
            self.router.start()
            self._write_state("starting")
            self.wait_ready([ROUTER])
            if self.spec.warm_up:
                self._warm_up()
        for process in self._processes():
            process.note_shm()
        self._ports.release()
        self._write_state("ready")
        self._is_ready = True

    def _make_render(self, model: Path) -> None:
        """The tier's process, not yet started. It loads while the engines do."""
        assert self._guard is not None
        port = self._ports.free()
        self.render_url = f"http://{LOOPBACK}:{port}"
        longest = engines.default_max_model_len(self.spec)
        if self.spec.engine == "sim":
            from kvferry.engine.folder_tokenizer import folder_of

            model = folder_of(rendering.sim_tokenizer(self.spec))
        argv = rendering.render_command(self.spec, model, port, longest)
        env = rendering.render_environment(self.spec, engines.QUIET_ENV, self._scratch)
        self.render = ManagedProcess(RENDER, argv, env, self.state_dir.logs / "render.log", self._guard)

    def _plan(self) -> list[Engine]:
        plans = []
        for index, (name, role) in enumerate(self.spec.names()):
            tp = engines.plan_tp(self.spec, role)
            side_port = self._ports.free(tp) if self.mode.split else 0
            plans.append(Engine(name, role, self._ports.free(), side_port, tp, index))
        return plans

    def stop(self) -> None:
        """End everything. May be called at any time, more than once."""
        started = [process for process in self._processes() if process.pid]
        if started:
            try:
                self._write_state("stopping")
            except OSError:
                pass  # a full disk must not keep engines alive
            patience = 10.0 if self._is_ready else 3.0  # an engine that still loads has nothing to finish
            end_trees(
                [process.tree for process in started],
                grace=lambda: 0.0 if self._cancel.count >= 2 else patience,  # Ctrl-C twice: at once
                reap=lambda: [process.poll() for process in started],
            )
            for process in started:
                process.ended()
        if self._guard:
            self._guard.close()  # removes the scratch folder and state.json
            self._guard = None
        self._ports.release()
        self.state_dir.release()
        self.engines, self.router, self.render = [], None, None

    # -- while it runs ------------------------------------------------------------------------------------------

    def _processes(self) -> list[ManagedProcess]:
        return [engine.process for engine in self.engines] + self.fronts()

    def fronts(self) -> list[ManagedProcess]:
        """What is no engine: render tier and router."""
        return [process for process in (self.render, self.router) if process]

    def process(self, name: str) -> ManagedProcess:
        for process in self._processes():
            if process.name == name:
                return process
        raise ConfigError(f"no process {name!r}", hint=f"known: {', '.join(p.name for p in self._processes())}")

    def engine(self, name: str) -> RunningEngine:
        return next(engine for engine in self.engines if engine.name == name)

    def kill(self, name: str, number: int = signal.SIGKILL, *, leader_only: bool = False) -> None:
        """Send a signal to every process of one engine (or the router), or only to its first one."""
        process = self.process(name)
        process.note_shm()
        for pid in [process.pid] if leader_only else [member.pid for member in members([process.tree])]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def restart(self, name: str, *, wait: bool = True) -> None:
        """End what is left of it and start it again with the same command and ports."""
        process = self.process(name)
        end_trees([process.tree], grace=lambda: 5.0, reap=lambda: process.poll())
        process.ended()
        process.start()
        self._write_state("ready")
        if wait:
            self.wait_ready([name])
            process.note_shm()

    def dead(self) -> list[ManagedProcess]:
        """Those that ended though nobody asked them to."""
        return [process for process in self._processes() if process.pid and not process.running()]

    def wait_ready(self, names: Sequence[str]) -> None:
        """Wait until all of these answer /health. ProcessDied as soon as any process ended."""
        urls = {engine.name: engine.url for engine in self.engines}
        urls |= {ROUTER: self.router_url, RENDER: self.render_url}
        took = wait_healthy(
            self._processes(),
            {name: urls[name] for name in names},
            timeout_s=self.spec.ready_timeout_s,
            report=self._report,
            cancel=self._cancel,
        )
        self.start_s.update(took)

    def model_name(self) -> str:
        """The name under which the model is served."""
        return served_name(self.spec.model_or_default, self.spec.args_for("decode"))

    def _warm_up(self) -> None:
        rounds = 2 * max(self.spec.decode, self.spec.prefill if self.mode.split else 0)
        try:
            warm_up(self.router_url, rounds, report=self._report, cancel=self._cancel)
        except EngineError as error:
            for process in self.dead():
                raise process.died("in the warm-up") from None
            raise LaunchError(f"warm-up request failed: {error}", hint=f"logs: {self.state_dir.logs}") from None

    def _write_state(self, phase: Phase) -> None:
        rows = [process_state(e.process, e.role, e.url, e.side_channel) for e in self.engines if e.pid]
        if self.render and self.render.pid:
            rows.append(process_state(self.render, RENDER, self.render_url))
        if self.router and self.router.pid:
            rows.append(process_state(self.router, ROUTER, self.router_url))
        self.state_dir.write(
            State(
                phase=phase,
                mode=self.mode.name,
                model=self.spec.model_or_default,
                url=self.router_url,
                launcher_pid=os.getpid(),
                launcher_started=start_time(os.getpid()),
                story_dir=str(self.state_dir.story),
                auth_key_file=str(self.state_dir.auth_key),
                processes=tuple(rows),
            )
        )
