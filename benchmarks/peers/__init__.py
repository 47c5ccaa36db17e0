"""Other loaders beside pario on the same records: one file per peer over one command line.

    python -m benchmarks.peers --out DIR        installs, writes, reads, and fills measurements/peers.md

table.py names the peers and what they need; environments.py installs them; sets.py makes the records; reading.py is the
command line of every peer; judging.py tells what was delivered; conduct.py lets the peers take turns, in processes that
running.py starts; behaviour.py resumes, damages and divides unevenly; report.py writes the page. command.py has these
parts.
"""
