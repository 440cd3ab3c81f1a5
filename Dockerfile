# Serves with an external PostgreSQL: BASCULE_DATABASE_URL, BASCULE_SECRET_KEY and BASCULE_ADMIN_KEY are required.
FROM python:3.11-slim AS build
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE alembic.ini ./
COPY app app
COPY migrations migrations
# `bascule`, as the pages call it, beside Python.
RUN python -m venv /opt/bascule \
 && printf '#!/bin/sh\nexec python -m app "$@"\n' > /opt/bascule/bin/bascule && chmod 755 /opt/bascule/bin/bascule \
 && /opt/bascule/bin/pip install --no-cache-dir --require-hashes -r requirements.lock

FROM python:3.11-slim
# PostgreSQL and its children need somebody to reap them when the embedded server is used. Debian keeps one version
# of a package per release, so a pinned one would be gone with its next fix.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --create-home --home-dir /var/lib/bascule bascule
COPY --from=build /opt/bascule /opt/bascule
COPY --from=build /src /srv/bascule
WORKDIR /srv/bascule
# A number, by which a platform can tell that it is not root.
USER 10001
ENV PATH=/opt/bascule/bin:$PATH PYTHONUNBUFFERED=1 BASCULE_HOST=0.0.0.0 BASCULE_DATA_DIR=/var/lib/bascule
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/healthz', timeout=2)"]
ENTRYPOINT ["tini", "--"]
# Migrations before serving: `migrate` takes a lock, so any number of replicas may start at once.
CMD ["sh", "-c", "python -m app migrate && exec python -m app serve"]
