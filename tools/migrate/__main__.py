import sys

from isoloss.tools.migrate.command import main

if __name__ == "__main__":
    sys.exit(main())
