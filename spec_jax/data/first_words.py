"""Prefixes that a model continues into the turns of a user, so that the turns vary."""

from __future__ import annotations

import pathlib

from spec_jax.errors import ConfigError

ENGLISH = "english"  # the name of the list below
_ENGLISH = r"""
Write a short | Write a story about | Write an email to | Write a letter | Write an essay
Write a poem | Write a blog post | Write a dialogue between | Write down | Compose | Draft
Rewrite the following | Rewrite this | Edit the following | Correct | Improve the | Paraphrase
Shorten | Summarize | Translate | Describe | Describe a | Imagine | Imagine you are
Pretend that you are | You are | Act as | Suppose | Let's play | Picture yourself | If you were
Tell me | Tell me a | Tell me about | Explain | Explain how | Explain why | Explain the difference
In simple terms, | What is | What is the | What are | What are the | What does | What do you
What would | What happens when | What happened | What kind of | What causes | How do | How does
How do I | How is | How are | How can I | How many | How much | How long | How far | How would you
Why | Why is | Why are | Why do | Why did | When | When did | Where | Where is | Who | Who was
Which | Which of the | Is | Is it | Is there | Are | Do | Does | Did | Was | Should | Could you
Would | Will | A | A man | A farmer | A train | A store | A student | An | One | Two | Three
There are | There is | Each | Every | Each of the | If | If a | If the | If x | Given | Given a
Given the | Given that | Let | Assume | Consider | Solve | Find | Find the | Calculate | Compute
Determine | Count | Convert | Add | Prove that | The sum of | The average | The price of
The ratio of | John | Anna | Tom has | Maria | Implement | Implement a | Write a function
Write a Python function | Write a Python program | Write a program | Write code | Write a script
Write a SQL query | Write a regular expression | Write unit tests | In Python, | In C++,
In JavaScript, | Using Python, | def | def is_ | def count_ | def find_ | def get_ | class | import
from typing import List\n\n\ndef | ```python\ndef | Complete the following function | Complete the
Debug | Fix the | The following code | This code | What is wrong with | Refactor | Design | Design a
Develop | Build | Create | Create a | Make | Make a list | Generate | Prepare | Plan | Outline
Organize | List | List the | List three | Name | Name five | Give | Give me | Give an example
Provide | Suggest | Recommend | Brainstorm | Define | Identify | Classify | Categorize | Extract
Extract the | From the following | Read the following | Based on
Summarize the following passage:\n\n | Summarize this article in two sentences:\n\n
Read the passage and answer the question.\n\nPassage: | Extract the dates from this text:\n\n
List all names in this text:\n\n | Rewrite this paragraph in plain English:\n\n
Here is a report:\n\n | Turn these notes into an email:\n\n
What is the main idea of this text?\n\n | Shorten this:\n\n | Here is an article about
Below is a review | Text: | Context: | According to | The following | Analyze | Analyze the
Compare | Compare the | Discuss | Evaluate | Argue | Debate | Rate | Rank | Choose | Review | Sort
Arrange | Group | Match | Fill in | Answer | Help me | Please | Teach me | Show me | Advise | In
In the | In a | On | At | By | For | During | After | Before | While | As a | As an | With | Without
Since | Because | The | This | These | That | It | My | My friend | My dog | My teacher | Our | Your
We | We are | I | I have | I have a | I need | I need to | I want | I want to | I would like | I am
I was | I think | I don't | I can't | They | She | He | Hi | Hello | Hey, | Good morning | Thanks
Yes | No | Ok | Can a | Can you explain | Can you write | Can I
"""


def load_words(name: str) -> tuple[str, ...]:
    r"""Returns prefixes, one of which begins each turn of a user.

    Args:
      name: ``"english"``, ``""`` for none, or a file with one entry per line, where ``\n`` stands
        for a newline.

    Raises:
      ConfigError: The file cannot be read, or has no entries.
    """
    if not name:
        return ()
    text = _ENGLISH.replace(" | ", "\n")
    if name != ENGLISH:
        try:
            text = pathlib.Path(name).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"first words {name!r} cannot be read ({error}): give {ENGLISH!r}, a file with "
                "one entry per line, or an empty text for none"
            ) from None
    entries = (line.strip().replace("\\n", "\n") for line in text.split("\n"))
    words = tuple(dict.fromkeys(entry for entry in entries if entry.strip()))
    if not words:
        raise ConfigError(f"first words {name!r} has no entries: expected one per line")
    return words
