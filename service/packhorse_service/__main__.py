"""``python -m packhorse_service`` is the ``packhorse`` command."""

from packhorse_service.cli import main

if __name__ == "__main__":
    main()
