"""The site that `make docs` builds: `mkdocs.yml` configures MkDocs, the modules here add what it does not know."""
