"""`python -m attngap` is `attngap`."""

from attngap.cli import main

if __name__ == "__main__":
    main()
