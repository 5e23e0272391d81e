// Example texts: the checkpoint's own, or else these.

/** Returns the examples of a model, `{name, texts}`; each click on an example shows its next text. */
export function examplesOf(model) {
  return model.examples?.examples ?? GENERAL.map(({ name, text }) => ({ name, texts: [text] }));
}

const GENERAL = [
  {
    name: "Python",
    text: `import os
import json


class Settings:
    """What a program was told to do, read from a file."""

    def __init__(self, path):
        self.path = path
        self.values = {}

    def read(self):
        if not os.path.exists(self.path):
            raise FileNotFoundError(self.path)
        with open(self.path) as file:
            self.values = json.load(file)
        return self.values
`,
  },
  {
    name: "Repetition",
    text: `red = 1
green = 2
blue = 3
red = 1
green = 2
blue = 3
red = 1
green = 2
blue = 3
red = 1
green = 2
blue = 3
`,
  },
  {
    name: "Prose",
    text: `The function returns the first line that matches, and None if there is no such line. A file that cannot be read is skipped, but its name is kept so that the caller can tell what was left out and why.
`,
  },
  {
    name: "Unfinished",
    text: `def is_prime(number):
    if number < 2:
        return False
    for divisor in range(2, number):
        if number % divisor == 0:
            return`,
  },
];
