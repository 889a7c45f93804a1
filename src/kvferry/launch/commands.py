"""`kvferry up`, `down` and `status`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from kvferry.errors import ConfigError, LaunchError
from kvferry.launch import detach
from kvferry.launch.cancel import Cancel, Stopped
from kvferry.launch.deployment import Deployment
from kvferry.launch.process import ManagedProcess, ProcessDied
from kvferry.launch.router_arguments import check_router_arguments
from kvferry.launch.spec import DEFAULT_PROFILE, ENGINE_ARG_HELP, ENGINES, MODES, DeploymentSpec, engine_args
from kvferry.launch.state import ProcessState, State, StateDir, default_state_dir
from kvferry.launch.tree import Tree, alive, end_trees, members
from kvferry.launch.web import healthy


def say(line: str) -> None:
    """Progress goes to stderr, so that stdout holds the one line that scripts read."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass  # a closed terminal must not end the deployment half-way


def show_tail(error: ProcessDied) -> None:
    if error.tail:
        say("--- last lines of its log ---")
        for line in error.tail:
            say(f"  {line}")
        say("---")


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=default_state_dir(),
        metavar="DIR",
        help="folder for state, logs and stories (default: $KVFERRY_STATE_DIR or .kvferry)",
    )


def add_up_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", default="vllm", help=f"one of: {', '.join(ENGINES)} (default: vllm)")
    parser.add_argument("--model", default="", metavar="M", help="smollm2, or the folder of a model; with sim: a name")
    parser.add_argument("--profile", default=DEFAULT_PROFILE, metavar="NAME", help="sim: model and machine, or a file")
    parser.add_argument("--mode", default="push", help=f"one of: {', '.join(MODES)} (default: push)")
    parser.add_argument(
        "--bind",
        default="early",
        metavar="WHEN",
        help="mode stream: choose the decode engine early, late (prefill is done) or at=PERCENT of it (default: early)",
    )
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill engines (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode or colocated engines (default: 1)")
    parser.add_argument("--render", type=int, default=0, metavar="N", help="workers of a render tier (default: none)")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="the router's port (default: 8000; 0: any)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and KV (default: bfloat16)")
    parser.add_argument("--vllm-arg", action="append", default=[], metavar="ARG", help="argument for every engine")
    parser.add_argument("--prefill-arg", action="append", default=[], metavar="ARG", help="for prefill engines only")
    parser.add_argument("--decode-arg", action="append", default=[], metavar="ARG", help="for decode engines only")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="NAME:ARG", help=ENGINE_ARG_HELP)
    parser.add_argument("--router-arg", action="append", default=[], metavar="ARG", help="argument for the router")
    parser.add_argument("--render-arg", action="append", default=[], metavar="ARG", help="for the render tier only")
    parser.add_argument("--as-shipped", action="store_true", help="leave out the settings for engines on few CPU cores")
    parser.add_argument("--no-warm-up", action="store_true", help="ready without requests through the whole path")
    parser.add_argument(
        "--debug-invariants",
        action="store_true",
        help="engines end with an error if anything is left behind when nothing runs",
    )
    parser.add_argument("--detach", action="store_true", help="return when ready; stop with `kvferry down`")
    add_state_dir(parser)


def up(args: argparse.Namespace) -> int:
    spec = DeploymentSpec(
        engine=args.engine,
        profile=args.profile,
        mode=args.mode,
        bind=args.bind,
        model=args.model,
        prefill=1 if args.prefill is None else args.prefill,
        decode=args.decode,
        port=args.port,
        dtype=args.dtype,
        vllm_args=args.vllm_arg,
        prefill_args=args.prefill_arg,
        decode_args=args.decode_arg,
        one_args=engine_args(args.engine_arg),
        router_args=args.router_arg,
        render=args.render,
        render_args=args.render_arg,
        tuned=not args.as_shipped,
        warm_up=not args.no_warm_up,
        debug_invariants=args.debug_invariants,
        state_dir=args.state_dir,
    )
    mode = spec.check()
    if args.prefill and not mode.split:
        raise ConfigError(
            f"prefill: {args.prefill} engines, mode {mode.name!r} takes no prefill engines",
            hint="drop --prefill; --decode sets how many engines there are",
        )
    if args.detach:
        check_router_arguments(spec, mode)
        return detach.launch(StateDir(args.state_dir), sys.argv[1:], say)
    cancel = Cancel()
    cancel.catch_signals()
    cancel.add_lifeline(detach.parent_pipe())
    deployment = Deployment(spec, report=say, cancel=cancel)
    code = 130  # a stop before 'ready' is no success
    try:
        deployment.start()
        cancel.forget_lifeline()
        print(f"ready {deployment.router_url}", flush=True)
        code = 0
        _keep(deployment, cancel)
    except Stopped:
        say("stopping")
    except ProcessDied as error:
        show_tail(error)
        raise
    finally:
        deployment.stop()
        if deployment.started or cancel.count:
            say("stopped")
    return code


def _keep(deployment: Deployment, cancel: Cancel) -> None:
    """Wait for a stop. An engine that ends is reported once; the others go on (the router answers for it)."""
    reported: set[tuple[str, int]] = set()
    while True:
        cancel.pause(1.0)
        for process in deployment.dead():
            if (process.name, process.pid) not in reported:
                reported.add((process.name, process.pid))
                _report_death(process)


def _report_death(process: ManagedProcess) -> None:
    error = process.died("while serving")
    show_tail(error)
    say(f"kvferry: {error}")


def down(args: argparse.Namespace) -> int:
    """Stop what was started from a state folder. Nothing there: says so, and is no failure."""
    folder = StateDir(args.state_dir)
    state = folder.read()
    if state is None:
        print(f"nothing runs in {folder.path}")
        return 0
    launcher_lives = alive(state.launcher_pid, state.launcher_started)
    if launcher_lives:
        say(f"stopping {state.mode} at {state.url}")
        os.kill(state.launcher_pid, signal.SIGTERM)
        if not _gone(state, 60.0):
            say("the launcher does not stop; ending it by force")
            os.kill(state.launcher_pid, signal.SIGKILL)  # its watchdog ends the rest
            _gone(state, 10.0)
    trees = [Tree(process.pid, process.started, process.marker) for process in state.processes]
    left = members(trees)
    if left:
        end_trees(trees)
        left = members(trees)
    if left:
        raise LaunchError(f"still running: {', '.join(str(process.pid) for process in left)}")
    folder.remove()
    print(f"stopped {state.mode} at {state.url}" if launcher_lives else f"nothing runs in {folder.path}; tidied up")
    return 0


def _gone(state: State, seconds: float) -> bool:
    try:
        psutil.Process(state.launcher_pid).wait(seconds)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return not alive(state.launcher_pid, state.launcher_started)
    return True


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same facts as JSON on stdout")
    add_state_dir(parser)


def status(args: argparse.Namespace) -> int:
    """Exit 0 if all runs and answers, 1 otherwise."""
    folder = StateDir(args.state_dir)
    state = folder.read()
    runs = state is not None and alive(state.launcher_pid, state.launcher_started)
    if state is None or not runs:
        if args.json:
            print(json.dumps({"running": False, "state_dir": str(folder.path), "processes": []}, indent=2))
        else:
            print(f"nothing runs in {folder.path}")
        return 1
    rows = [_facts(process) for process in state.processes]
    facts = {
        "running": True,
        "phase": state.phase,
        "mode": state.mode,
        "model": state.model,
        "url": state.url,
        "launcher_pid": state.launcher_pid,
        "state_dir": str(folder.path),
        "story_dir": state.story_dir,
        "auth_key_file": state.auth_key_file,
        "processes": rows,
    }
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print(f"{state.phase}: {state.mode}, {state.model}, {state.url}")
        for row in rows:
            health = "healthy" if row["healthy"] else "running" if row["alive"] else "dead"
            print(
                f"  {row['name']:<12} {health:<8} pid {row['pid']:<8} {row['url']:<24} "
                f"{row['memory_mib']:>6} MiB  up {row['uptime_s']:.0f} s  {row['log']}"
            )
    return 0 if state.phase == "ready" and all(row["healthy"] for row in rows) else 1


def _facts(process: ProcessState) -> dict[str, str | int | float | bool]:
    lives = alive(process.pid, process.started)
    memory = 0
    for member in members([Tree(process.pid, process.started, process.marker)]) if lives else []:
        try:
            memory += member.memory_info().rss
        except psutil.Error:
            continue
    return {
        "name": process.name,
        "role": process.role,
        "pid": process.pid,
        "alive": lives,
        "healthy": lives and healthy(process.url),
        "url": process.url,
        "side_channel": process.side_channel,
        "memory_mib": memory >> 20,
        "uptime_s": round(time.time() - process.started, 1) if lives else 0.0,
        "log": process.log,
    }
