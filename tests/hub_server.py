"""A small Hub on the loopback: enough of its interface for the real huggingface_hub client to push, tag and pull.

Repositories live in memory. `server.faults` makes chosen requests fail: a list of (method, pattern, answer, times),
where the answer is a status, or one of `Handler.misbehave`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import constants

TOKEN, USER = "hf_" + "g" * 34, "ann"


@dataclass
class Commit:
    id: str
    message: str
    files: dict[str, bytes]
    lfs: set[str]
    uploaded: list[str]  # paths that this commit's request brought
    deleted: list[str] = field(default_factory=list)


@dataclass
class Repo:
    private: bool
    refs: dict[str, list[Commit]] = field(default_factory=dict)  # branch -> commits, newest last
    tags: dict[str, Commit] = field(default_factory=dict)
    pull_requests: list[Commit] = field(default_factory=list)

    def find(self, revision: str) -> Commit | None:
        if revision in self.refs:
            return self.refs[revision][-1]
        if revision in self.tags:
            return self.tags[revision]
        return next((c for commits in self.refs.values() for c in commits if c.id == revision), None)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def new_id(message: str, files: dict[str, bytes], count: int) -> str:
    return hashlib.sha1(repr((message, sorted(files), count)).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.faults: list[list] = []
        self.requests: list[tuple[str, str]] = []  # method and path of every request
        self.turn = threading.RLock()
        self.silence = threading.Event()  # set: silent requests end
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, repo_id: str, files: dict[str, bytes], message: str = "files") -> Commit:
        """A commit made on the server's side."""
        repo = self.repos.setdefault(repo_id, Repo(private=False, refs={"main": []}))
        commit = Commit(new_id(message, files, len(repo.refs["main"])), message, dict(files), set(), list(files))
        repo.refs["main"].append(commit)
        return commit


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_request(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self.read_chunks()
        parts = urlsplit(self.path)
        path, self.query = unquote(parts.path), parse_qs(parts.query)
        with self.server.turn:
            self.server.requests.append((self.command, path))
            for fault in self.server.faults:
                method, pattern, answer, times = fault
                if times > 0 and method == self.command and re.search(pattern, path):
                    fault[3] -= 1
                    if answer in ("cut", "half", "silent"):
                        self.misbehave(answer, path)
                        return
                    self.reply(answer, {"error": "the server is having a bad day"})
                    return
            given = self.headers.get("Authorization")
            self.user = USER if given == f"Bearer {TOKEN}" else None
            if given and not self.user:
                self.reply(401, {"error": "Invalid user token."}, {"X-Error-Message": "Invalid user token."})
                return
            for method, pattern, action in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and self.command in method.split():
                    action(self, **found.groupdict())
                    return
            self.reply(404, {"error": f"no route for {self.command} {path}"})

    def misbehave(self, how: str, path: str) -> None:
        """Cut: no answer. Half: the head of an answer and half of its body. Silent: nothing, and nothing ends."""
        self.close_connection = True
        if how == "half":
            repo_id, revision, name = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path).groups()
            content = self.server.repos[repo_id].find(revision).files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
        elif how == "silent":
            self.server.turn.release()
            self.server.silence.wait(30)
            self.server.turn.acquire()
        self.connection.close()

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_request  # noqa: N815

    def read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def reply(self, status: int, content: object = None, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # --- who may what ------------------------------------------------------------------------------------------

    def repo(self, repo_id: str, write: bool = False) -> Repo | None:
        repo = self.server.repos.get(repo_id)
        if repo is None or (repo.private and not self.user):
            self.reply(404 if self.user else 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        if write and repo_id.split("/")[0] != self.user:
            self.reply(403 if self.user else 401, {"error": "You don't have the rights to write here"})
            return None
        return repo

    def commit_at(self, repo: Repo, revision: str) -> Commit | None:
        commit = repo.find(revision)
        if commit is None:
            self.reply(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        return commit

    # --- the interface -----------------------------------------------------------------------------------------

    def create_repo(self) -> None:
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or self.user}/{asked['name']}"
        if not self.user:
            self.reply(401, {"error": "Unauthorized"})
        elif not repo_id.startswith(f"{USER}/"):
            self.reply(403, {"error": "You don't have the rights to create a model under this namespace"})
        elif repo_id in self.server.repos:
            self.reply(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{repo_id}"})
        else:
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.server.repos[repo_id] = Repo(private, {"main": []})
            self.server.add(repo_id, {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
            self.reply(200, {"url": f"{self.server.url}/{repo_id}", "name": repo_id, "id": repo_id})

    def validate_yaml(self) -> None:
        import yaml

        text = json.loads(self.body)["content"]
        front = re.match(r"---\n(.*?)\n---\n", text, re.S)
        try:
            fields = yaml.safe_load(front.group(1)) if front else {}
            problems = [] if isinstance(fields, dict) else ["not a mapping"]
        except yaml.YAMLError as error:
            problems = [str(error)]
        self.reply(400 if problems else 200, {"errors": [{"message": p} for p in problems], "warnings": []})

    def preupload(self, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id, write="create_pr" not in self.query)
        commit = self.commit_at(repo, revision) if repo else None
        if repo is None or commit is None:
            return
        answer = []
        for file in json.loads(self.body)["files"]:
            path, kind = file["path"], "lfs" if file["path"].endswith(".safetensors") else "regular"
            content = commit.files.get(path)
            oid = None
            if content is not None:
                oid = hashlib.sha256(content).hexdigest() if path in commit.lfs else git_oid(content)
            answer.append({"path": path, "uploadMode": kind, "shouldIgnore": False, "oid": oid})
        self.reply(200, {"files": answer})

    def lfs_batch(self, repo_id: str) -> None:
        if self.repo(repo_id) is None:
            return
        objects = []
        for item in json.loads(self.body)["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.server.blobs:
                link = f"{self.server.url}/blobs/{item['oid']}?X-Amz-Signature=secretsignature"
                entry["actions"] = {"upload": {"href": link, "header": {}}}
            objects.append(entry)
        self.reply(200, {"transfer": "basic", "objects": objects})

    def put_blob(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.reply(400, {"error": "wrong content"})
            return
        self.server.blobs[oid] = self.body
        self.reply(200, {})

    def commit(self, repo_id: str, revision: str) -> None:
        as_request = "create_pr" in self.query
        repo = self.repo(repo_id, write=not as_request)
        parent = self.commit_at(repo, revision) if repo else None
        if repo is None or parent is None:
            return
        files, lfs, message, brought, gone = dict(parent.files), set(parent.lfs), "", [], []
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, parent.id):
                    self.reply(412, {"error": "A commit has happened since. Please refresh and try again."})
                    return
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                lfs.discard(value["path"])
                brought.append(value["path"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
                lfs.add(value["path"])
                brought.append(value["path"])
            elif item["key"] == "deletedFile":
                del files[value["path"]]
                gone.append(value["path"])
        count = sum(map(len, repo.refs.values())) + len(repo.pull_requests)
        commit = Commit(new_id(message, files, count), message, files, lfs, brought, gone)
        url = f"{self.server.url}/{repo_id}"
        answer = {"success": True, "commitOid": commit.id, "commitUrl": f"{url}/commit/{commit.id}", "hookOutput": ""}
        if as_request:
            repo.pull_requests.append(commit)
            answer["pullRequestUrl"] = f"{url}/discussions/{len(repo.pull_requests)}"
        else:
            repo.refs[revision].append(commit)
        self.reply(200, answer)

    def make_branch(self, repo_id: str, name: str) -> None:
        repo = self.repo(repo_id, write=True)
        if repo is None:
            return
        if name in repo.refs:
            self.reply(409, {"error": "Reference already exists"})
            return
        repo.refs[name] = list(repo.refs["main"])
        self.reply(200, {})

    def make_tag(self, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id, write=True)
        commit = self.commit_at(repo, revision) if repo else None
        if repo is None or commit is None:
            return
        tag = json.loads(self.body)["tag"]
        if tag in repo.tags:
            self.reply(409, {"error": "Tag reference exists already"})
            return
        repo.tags[tag] = commit
        self.reply(200, {})

    def delete_tag(self, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id, write=True)
        if repo is not None:
            del repo.tags[revision]
            self.reply(200, {})

    def refs(self, repo_id: str) -> None:
        repo = self.repo(repo_id)
        if repo is not None:
            branches = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": c[-1].id} for b, c in repo.refs.items()]
            tags = [{"name": t, "ref": f"refs/tags/{t}", "targetCommit": c.id} for t, c in repo.tags.items()]
            self.reply(200, {"branches": branches, "tags": tags, "converts": []})

    def info(self, repo_id: str, revision: str = "main") -> None:
        repo = self.repo(repo_id)
        commit = self.commit_at(repo, revision) if repo else None
        if repo is not None and commit is not None:
            files = [{"rfilename": path, "size": len(content)} for path, content in sorted(commit.files.items())]
            self.reply(200, {"id": repo_id, "sha": commit.id, "private": repo.private, "siblings": files})

    def tree(self, repo_id: str, revision: str, path: str = "") -> None:
        repo = self.repo(repo_id)
        commit = self.commit_at(repo, revision) if repo else None
        if commit is not None:
            inside = {p: c for p, c in commit.files.items() if not path or p.startswith(f"{path}/")}
            if path and not inside:
                self.reply(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
                return
            entries = [{"type": "file", "path": p, "size": len(c), "oid": git_oid(c)} for p, c in inside.items()]
            self.reply(200, entries)

    def paths_info(self, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id)
        commit = self.commit_at(repo, revision) if repo else None
        if commit is not None:
            asked = parse_qs(self.body.decode()).get("paths") or json.loads(self.body or b"{}").get("paths", [])
            found = {path: commit.files[path] for path in asked if path in commit.files}
            self.reply(200, [{"type": "file", "path": p, "size": len(c), "oid": git_oid(c)} for p, c in found.items()])

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo = self.repo(repo_id)
        commit = self.commit_at(repo, revision) if repo else None
        if commit is None:
            return
        if path not in commit.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.id}
            self.reply(404, {"error": "Entry not found"}, headers)
            return
        content = commit.files[path]
        headers = {"X-Repo-Commit": commit.id, "ETag": f'"{git_oid(content)}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and self.command == "GET":
            start, stop = int(asked.group(1)), int(asked.group(2) or len(content) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            self.reply(206, content[start:stop], headers)
            return
        if self.command == "HEAD":
            headers["Content-Length"] = str(len(content))
        self.reply(200, content, headers)


ID, REV = r"(?P<repo_id>[\w.-]+/[\w.-]+)", r"(?P<revision>[^/]+)"
ROUTES = [
    ("POST", r"/api/repos/create", Handler.create_repo),
    ("POST", r"/api/validate-yaml", Handler.validate_yaml),
    ("POST", rf"/api/models/{ID}/preupload/{REV}", Handler.preupload),
    ("POST", rf"/api/models/{ID}/commit/{REV}", Handler.commit),
    ("POST", rf"/api/models/{ID}/branch/(?P<name>[^/]+)", Handler.make_branch),
    ("POST", rf"/api/models/{ID}/tag/{REV}", Handler.make_tag),
    ("DELETE", rf"/api/models/{ID}/tag/{REV}", Handler.delete_tag),
    ("POST", rf"/{ID}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/blobs/(?P<oid>[0-9a-f]{64})", Handler.put_blob),
    ("GET", rf"/api/models/{ID}/refs", Handler.refs),
    ("GET", rf"/api/models/{ID}/revision/{REV}", Handler.info),
    ("GET", rf"/api/models/{ID}/tree/{REV}(?:/(?P<path>.*))?", Handler.tree),
    ("POST", rf"/api/models/{ID}/paths-info/{REV}", Handler.paths_info),
    ("GET", rf"/api/models/{ID}", Handler.info),
    ("GET HEAD", rf"/{ID}/resolve/{REV}/(?P<path>.+)", Handler.resolve),
]


@contextmanager
def logged_in(monkeypatch: Any, cache: Path) -> Iterator[Hub]:
    """A Hub, a cache of its own, and a client that is logged in; waiting between retries is left out."""
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    address = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    yield server
    server.shutdown()
    server.server_close()
