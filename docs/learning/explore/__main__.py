"""`python -m docs.learning.explore`: build the page."""

from docs.learning.explore import PAGE, build

if __name__ == "__main__":
    PAGE.write_text(build(), encoding="utf-8")
    print(f"{PAGE}: open it in a browser.")
