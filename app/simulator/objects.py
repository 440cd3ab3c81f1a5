"""The API's objects, as JSON: sessions, threads, agents and environments."""

from app.simulator.journal import Thread
from app.simulator.refusal import Json
from app.simulator.script import EnvironmentKind
from app.simulator.session import Session
from app.simulator.timeline import US_PER_S, stamp_text


def agent_object(given: Json, agent_id: str) -> Json:
    """Return an agent with everything that a script left out."""
    model = {"id": "claude-opus-5", "effort": {"type": "high"}, "speed": "standard", "inference_geo": None}
    return {
        "type": "agent",
        "id": given.get("id", agent_id),
        "version": given.get("version", 1),
        "name": given.get("name", "agent"),
        "description": given.get("description"),
        "system": given.get("system"),
        "model": {**model, **given.get("model", {})},
        "tools": given.get("tools", []),
        "mcp_servers": given.get("mcp_servers", []),
        "skills": given.get("skills", []),
        "multiagent": given.get("multiagent"),
        "execution_identity": {"type": "service_account"},
    }


def session_object(session: Session) -> Json:
    """Return a session as retrieve shows it, with a status that may lag."""
    duration_s = (session.timeline.now_us - session.created_us) / US_PER_S
    return {
        "type": "session",
        "id": session.id,
        "agent": session.agent,
        "environment_id": session.environment_id,
        "status": session.shown_status(),
        "title": session.title,
        "metadata": session.metadata,
        "resources": [],
        "vault_ids": [],
        "outcome_evaluations": [],
        "budget": session.budget,
        "deployment_id": None,
        "stats": {"active_seconds": 0.0, "duration_seconds": duration_s},
        "usage": session.usage,
        "created_at": stamp_text(session.created_us),
        "updated_at": stamp_text(session.updated_us),
        "archived_at": None if session.archived_us is None else stamp_text(session.archived_us),
    }


def thread_object(session: Session, thread: Thread) -> Json:
    """Return a thread as retrieve shows it."""
    agent = {key: value for key, value in thread.agent.items() if key != "multiagent"}
    return {
        "type": "session_thread",
        "id": thread.id,
        "session_id": session.id,
        "parent_thread_id": thread.parent_id,
        "workflow_run_id": None,
        "status": thread.status,
        "agent": agent,
        "stats": {"active_seconds": 0.0, "duration_seconds": 0.0, "startup_seconds": 0},
        "usage": {"input_tokens": 420, "output_tokens": 60},
        "created_at": stamp_text(thread.created_us),
        "updated_at": stamp_text(thread.updated_us),
        "archived_at": None if thread.archived_us is None else stamp_text(thread.archived_us),
    }


def environment_object(environment_id: str, kind: EnvironmentKind, created_us: int) -> Json:
    """Return an environment as retrieve shows it."""
    config: Json = {"type": kind}
    if kind == "cloud":
        packages = {"type": "packages", "apt": [], "cargo": [], "gem": [], "go": [], "npm": [], "pip": []}
        config |= {"networking": {"type": "unrestricted"}, "packages": packages}
    return {
        "type": "environment",
        "id": environment_id,
        "name": kind,
        "description": "",
        "config": config,
        "metadata": {},
        "scope": "organization",
        "created_at": stamp_text(created_us),
        "updated_at": stamp_text(created_us),
        "archived_at": None,
    }
