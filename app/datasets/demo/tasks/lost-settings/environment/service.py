"""The orders service. Here it only checks that its settings are complete."""

import configparser
import sys

settings = configparser.ConfigParser()
if not settings.read("config/service.ini"):
    sys.exit("config/service.ini is missing")
wanted = {"server": ["host", "port", "workers"], "limits": ["body_bytes", "idle_s"]}
missing = [f"{part}.{key}" for part, keys in wanted.items() for key in keys if not settings.has_option(part, key)]
if missing:
    sys.exit(f"settings are incomplete: {', '.join(missing)}")
print("ready")
