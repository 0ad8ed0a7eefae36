"""What an upload sends, and a download brings, compared with the checkpoint's files: a local server speaks the
hub's calls."""

import base64
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from conftest import DATA, ROOT
from safetensors.torch import load

from extras import hub as hub_files

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
REPO = "someone/act-test"


class Hub(http.server.ThreadingHTTPServer):
    """Create a repository, ask how to send each file, send the large ones, commit: `files` arrived."""

    def __init__(self, broken_call=None, status=500):
        super().__init__(("127.0.0.1", 0), Handler)
        self.broken_call, self.status = broken_call, status  # part of a call's path, and what it answers
        self.repos, self.objects, self.files, self.calls = [], {}, {}, []
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = b""
            while size := int(self.rfile.readline(), 16):
                parts += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return parts
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_call(self):
        hub, path, body = self.server, self.path.partition("?")[0], self.body()
        hub.calls.append(f"{self.command} {path}")
        if hub.broken_call is not None and hub.broken_call in path:
            self.answer({"error": "out of order"}, hub.status)
        elif path == "/api/repos/create":
            hub.repos.append(json.loads(body))
            self.answer({"url": f"{hub.address}/{REPO}", "name": REPO, "id": "1"})
        elif path == "/api/validate-yaml":
            self.answer({"warnings": [], "errors": []})
        elif path == f"/api/models/{REPO}/preupload/main":
            files = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            self.answer(
                {
                    "files": [
                        {
                            "path": f["path"],
                            "uploadMode": modes[f["path"].endswith(".safetensors")],
                            "shouldIgnore": False,
                            "oid": None,
                        }
                        for f in files
                    ]
                }
            )
        elif path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [
                o | {"actions": {"upload": {"href": f"{hub.address}/upload/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif path.startswith("/upload/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/upload/")
            hub.objects[path.removeprefix("/upload/")] = body
            self.answer({})
        elif path == f"/api/models/{REPO}/commit/main":
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            self.answer(
                {"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.address}/{REPO}/commit/0"}
            )
        elif path == f"/api/models/{REPO}/tree/{'0' * 40}":
            self.answer(
                [{"type": "file", "path": p, "size": len(d), "oid": sha1(d)} for p, d in hub.files.items()]
            )
        elif path.startswith(f"/{REPO}/resolve/") and path.rpartition("/")[2] in hub.files:
            data = hub.files[path.rpartition("/")[2]]
            self.send_response(200)
            headers = {"ETag": sha1(data), "X-Repo-Commit": "0" * 40, "Content-Length": str(len(data))}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)
        elif path.startswith("/api/models/") and REPO not in path:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.command == "GET" and path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            self.answer({"id": REPO, "sha": "0" * 40, "siblings": [], "private": False})
        else:
            self.answer({"error": f"no such call: {self.command} {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_call


def sha1(data):
    return hashlib.sha1(data).hexdigest()


def push(hub, step_dir, home, facts=None):
    """Against `hub` alone: `ckpt.py convert --push-to-hub`, or with facts what a run does at its end."""
    if facts is None:
        command = [str(ROOT / "ckpt.py"), "convert", "--checkpoint-dir", str(step_dir), "--push-to-hub", REPO]
    else:
        command = ["-c", f"from extras import hub; hub.upload_policy({str(step_dir)!r}, {REPO!r}, {facts!r})"]
    return against(hub, home, command)


def against(hub, home, command, **settings):
    """Run Python with this hub as the only one, and caches under `home`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    settings |= {
        "HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "HOME": str(home),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *command],
        env=clean | settings, cwd=home, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


LOAD = """
import sys
from extras import lerobot_ckpt
try:
    config, stats = lerobot_ckpt.load_policy_files(sys.argv[1])
    policy = lerobot_ckpt.policy_of(config, stats)
    lerobot_ckpt.load_weights(sys.argv[1], policy)
    print(sum(policy.state_dict()[key].double().sum().item() for key in sorted(policy.state_dict())))
except ValueError as error:
    sys.exit(str(error))
"""


def test_a_policy_of_the_hub_is_downloaded_once_and_then_read_from_the_cache(step_dir, tmp_path, monkeypatch):
    """Its weights are those of the folder, with and without a network; what is no policy's stays there."""
    folder = step_dir / "pretrained_model"
    with Hub() as hub:
        hub.files = {file.name: file.read_bytes() for file in folder.iterdir()} | {"video.mp4": b"x"}
        got = against(hub, tmp_path, ["-c", LOAD, REPO])
        weights = load((folder / "model.safetensors").read_bytes())
        assert got.stdout == f"{sum(weights[key].double().sum().item() for key in sorted(weights))}\n", (
            got.stderr
        )
        calls = len(hub.calls)
        assert calls and not any("video.mp4" in call for call in hub.calls)
        assert against(hub, tmp_path, ["-c", LOAD, REPO]).stdout == got.stdout
        assert len(hub.calls) == calls
    assert against(hub, tmp_path, ["-c", LOAD, REPO], HF_HUB_OFFLINE="1").stdout == got.stdout
    shutil.copytree(folder, tmp_path / REPO)
    monkeypatch.chdir(tmp_path)
    assert hub_files.policy_folder(REPO) == REPO  # a folder of that name comes first


@pytest.mark.parametrize("trouble", ["no such model", "offline", "no network", "no huggingface_hub"])
def test_a_policy_that_the_hub_does_not_give_is_one_sentence_with_a_way_out(tmp_path, trouble):
    name, settings, load_ = "someone/else", {}, LOAD
    with Hub() as hub:
        why = "it has no such model, or it is private"
        if trouble == "no such model":
            done = against(hub, tmp_path, ["-c", load_, name])
    if trouble != "no such model":
        if trouble == "offline":
            settings, why = {"HF_HUB_OFFLINE": "1"}, "offline mode is enabled"
        elif trouble == "no network":
            why = "Connection refused"
        else:
            load_ = f"import sys; sys.modules['huggingface_hub'] = None\n{LOAD}"
            why = "huggingface_hub, which would ask for it, is not installed"
        done = against(hub, tmp_path, ["-c", load_, name], **settings)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert f"{name} (--policy.path or --checkpoint) is no folder here" in done.stderr and why in done.stderr
    assert f"`hf download {name} --local-dir DIR`" in done.stderr


def test_a_path_that_has_not_the_form_of_a_model_is_not_asked_for(tmp_path):
    for path in ("a/b/c", "/a/b", "./a", "../a/b", "a", "a/.b", str(tmp_path), "a/"):
        assert hub_files.policy_folder(path) == path


@pytest.fixture
def step_dir(tmp_path):
    return shutil.copytree(DATA / "ckpts" / "env_single_safetensors" / "000010", tmp_path / "run" / "000010")


def test_an_upload_sends_every_file_of_the_checkpoint_and_a_model_card(step_dir, tmp_path):
    with Hub() as hub:
        done = push(hub, step_dir, tmp_path, {"val_l1_loss": 0.125, "success rate": "40 of 50"})
    assert done.returncode == 0, done.stderr
    local = {f.name: f.read_bytes() for f in (step_dir / "pretrained_model").iterdir()}
    assert hub.files == local
    assert set(local) == {
        "README.md", "config.json", "model.safetensors", "train_config.json",
        "policy_preprocessor.json", "policy_preprocessor_step_3_normalizer_processor.safetensors",
        "policy_postprocessor.json", "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
    }  # fmt: skip
    assert hub.repos[0]["name"] == "act-test" and hub.repos[0]["organization"] == "someone"
    card = hub.files["README.md"].decode()
    for fact in (
        "library_name: lerobot",
        "pipeline_tag: robotics",
        "local/",
        "| seed | 1000 |",
        "0.125",
        "40 of 50",
    ):
        assert fact in card


@pytest.mark.parametrize(
    "broken_call, status",  # after a 500 huggingface_hub repeats the call for a while: once is enough here
    [("/api/repos/create", 500), ("/preupload/", 403), ("/upload/", 403), ("/commit/", 403)],
)
def test_a_failed_upload_keeps_the_checkpoint_and_says_how_to_repeat_it(
    step_dir, tmp_path, broken_call, status
):
    weights = (step_dir / "pretrained_model" / "model.safetensors").read_bytes()
    with Hub(broken_call, status) as hub:
        done = push(hub, step_dir, tmp_path)
    assert done.returncode == 1 and not hub.files
    sentence = done.stderr.strip().splitlines()[-1]
    assert REPO in sentence and "Traceback" not in done.stderr
    now = load((step_dir / "pretrained_model" / "model.safetensors").read_bytes())
    assert all(torch.equal(now[key], value) for key, value in load(weights).items())
    command = sentence.partition("python ckpt.py ")[2].split()
    assert command == ["convert", "--checkpoint-dir", str(step_dir), "--push-to-hub", REPO]
    if "/commit/" in broken_call:
        with Hub() as hub:
            assert push(hub, step_dir, tmp_path).returncode == 0
        assert "model.safetensors" in hub.files and "README.md" in hub.files


def test_without_a_network_an_upload_fails_in_one_sentence(step_dir, tmp_path):
    with Hub() as hub:
        pass  # its port is closed again
    done = push(hub, step_dir, tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"--push-to-hub {REPO}" in done.stderr.strip().splitlines()[-1]
