"""Answers as people write them, kind by kind: each beside what it equals, and beside what only
looks like it.

The order counts: the answer comes first, the gold one second.
"""

from __future__ import annotations

import json
from pathlib import Path

from reward_scores import math_dapo, math_reward, prime_math, qa_em
from reward_scores.equivalence import equivalent
from reward_scores.final_answer import last_closed_box


def pairs(text: str) -> list[tuple[str, ...]]:
    """Read ``answer ~ gold``, several a line between ``@@``."""
    every = [each for line in text.strip().splitlines() for each in line.split(" @@ ")]
    return [tuple(side.strip() for side in each.split(" ~ ")) for each in every]


RIGHT = pairs(r"""
    11111111100 ~ 11,\! 111,\! 111,\! 100
    \{x \in \mathbb{R} \mid x > 1\} ~ (1,\infty) @@ x>1, x\in\mathbb{R} ~ x>1
    k\pi, k\in\mathbb{Z} ~ k\pi @@ x = k\pi \ (k \in \mathbb{Z}) ~ k\pi @@ 5 more ~ 5
    m+n=42 ~ 42 @@ x=5 ~ 5 @@ 5 ~ x=5 @@ 5 ~ \text{Area}=5 @@ 5 ~ f(2)=5 @@ \frac12 ~ P(A)=\frac12
    5 ~ AB=5 @@ 5 ~ \angle ABC = 5^\circ @@ 5 ~ x_1=5 @@ 5 ~ \theta = 5 @@ 5 ~ S_{ABC}=5
    5 ~ S_n = 5 @@ 5 ~ \overline{AB}=5 @@ 5 ~ area = 5 @@ 5 ~ |AB| = 5 @@ n+1 ~ a_n = n+1
    x\equiv 3 \pmod 7 ~ 3 @@ x \equiv 3 \pmod{7} ~ x \equiv 3 \pmod 7
    x \equiv 10 \pmod{7} ~ x \equiv 3 \pmod 7 @@ 3 \pmod 7 ~ x \equiv 3 \pmod 7
    x \equiv 3 \bmod 7 ~ x \equiv 3 \pmod 7 @@ x \equiv 3\ (\text{mod } 7) ~ x \equiv 3 \pmod 7
    x \equiv -4 \pmod 7 ~ x\equiv 3 \pmod 7 @@ \frac{1}{3} \approx 0.333 ~ \frac13
    \frac13 ~ \frac{1}{3} \approx 0.333 @@ 0.333 ~ \frac{1}{3} \approx 0.333 @@ \approx 3.14 ~ 3.14
    x \approx 3.14 ~ 3.14 @@ \pi \approx 3.14 ~ 3.14 @@ \pi\approx 3.14 ~ \pi
    2\sqrt{3} \simeq 3.46 ~ 2\sqrt3 @@ about 5 ~ 5 @@ approximately 5.2 ~ 5.2
    \text{approximately } 5.2 ~ 5.2 @@ 3.14 ~ \approx 3.14 @@ 11,\!111 ~ 11111 @@ 11{,}111 ~ 11111
    11,\! 111,\!100 ~ 11{,}111{,}100 @@ 1\,000\,000 ~ 1000000 @@ 1 000 000 ~ 1{,}000{,}000
    \cfrac12 ~ 0.5 @@ \nicefrac{1}{2} ~ 1/2 @@ {1 \over 2} ~ 1/2 @@ \frac 1 2 ~ 1/2
    {5 \choose 2} ~ 10 @@ \textnormal{yes} ~ yes @@ x \ne 3 ~ x \neq 3 @@ x != 3 ~ x\neq3
    3 \neq x ~ x\neq 3 @@ x ≠ 3 ~ x\ne 3 @@ (-\infty, 3] ~ (-infinity, 3] @@ (-inf, 3) ~ (-\infty,3)
    (-∞,3) ~ (-infinity,3) @@ \text{infinity} ~ \infty @@ Infinity ~ \infty @@ +\infty ~ \infty
    (-\infty,+\infty) ~ \mathbb{R} @@ \text{all real numbers} ~ \mathbb{R}
    all real numbers ~ (-\infty,\infty) @@ x \in \mathbb{R} ~ \mathbb R
    (x, y) = (5, 8), (8, 5) ~ (5,8),(8,5) @@ (x,y)\in\{(5,8),(8,5)\} ~ (5,8),(8,5)
    (5,8)\text{ or }(8,5) ~ (5,8),(8,5) @@ (5,8) or (8,5) ~ (8,5) \text{ and } (5,8)
    x=5,y=8 ~ (5,8) @@ (5,8) ~ x=5,y=8 @@ (x,y)=(5,8) ~ x = 5, y = 8
    x=5, y=8 ~ x=5\text{ and }y=8 @@ p=5,q=2;p=7,q=2 ~ (5,2),(7,2) @@ (5,2);(7,2) ~ (7,2),(5,2)
    3;5 ~ 3,5 @@ 3 \text{ or } 5 ~ x=3,5 @@ x=3\text{ or }x=5 ~ \{3,5\}
    x = 3 \quad\text{or}\quad x = 5 ~ 3,5 @@ n=1,2,3 ~ 1,2,3 @@ 3\quad5 ~ 3\quad5
    \text{61} ~ 61.0 @@ \text{61} ~ 61 @@ \mathrm{61} ~ 61 @@ \text{ 3 } ~ 3 @@ 5€ ~ 5 @@ €5 ~ 5
    5 euros ~ 5 @@ 5 euro ~ €5 @@ \text{€}5 ~ 5 @@ 5\text{ \euro} ~ 5 @@ 5 pct ~ 5\%
    5 percentage ~ 5\% @@ 5\text{ percent} ~ 5\% @@ 5 \mathrm{~cm} ~ 5
    5 \mathrm{~cm}^{2} ~ 5\text{ square centimeters} @@ 5\text{ m}^2 ~ 5\text{ square meters}
    5 square meters ~ 5\text{ m}^2 @@ 5 \text{ km/h} ~ 5\text{ kilometers per hour}
    5\text{ mph} ~ 5\text{ miles per hour} @@ 5\text{ sq. units} ~ 5
    5\text{ units}^2 ~ 5\text{ square units} @@ 5\text{ cm}^2 ~ 5\text{ square units}
    5\text{ cubic feet} ~ 5\text{ ft}^3 @@ 5¢ ~ 5 @@ 5\text{ cents} ~ 5¢ @@ 5\textdegree ~ 5
    5^{\circ}\mathrm{C} ~ 5 @@ 17 \bmod 5 = 2 ~ 2 @@ 17 mod 5 = 2 ~ 2 @@ \gcd(12,18)=6 ~ 6
    \lim_{x\to0}\frac{\sin x}{x}=1 ~ 1 @@ \int_0^1 2x\,dx = 1 ~ 1 @@ \sum_{k=1}^{10} k = 55 ~ 55
    \det A = 5 ~ 5 @@ \begin{vmatrix}1&2\\3&4\end{vmatrix}=-2 ~ -2 @@ \max f = 3 ~ 3 @@ 5+6=11 ~ 11
    \binom{5}{2}=10 ~ 10 @@ e^{i\pi}=-1 ~ -1 @@ x+1=6 \implies x=5 ~ 5
    \begin{cases}x=1\\y=2\end{cases} ~ (1,2) @@ x=1,\ y=2 ~ \begin{cases} x=1 \\ y=2 \end{cases}
    \langle 1,2\rangle ~ (1,2) @@ \lbrack 1,2\rbrack ~ [1,2] @@ \bigl(1,2\bigr) ~ (1,2)
    \Big(\frac12,1\Big) ~ (0.5,1) @@ \textbf{(B)} ~ B @@ \text{(B) } 12 ~ B @@ \mathrm{B} ~ B
    (B) ~ B @@ (b) ~ B @@ A ~ \textbf{(A)}\ 15 @@ 90^{\circ} ~ 90 @@ \arctan 1 ~ \pi/4
    \tg x ~ \tan x @@ \log_{10} 100 ~ 2 @@ \sqrt[3]{27} ~ 3 @@ \sqrt 2 ~ \sqrt{2}
    \left\{1,2\right\} ~ \{2,1\} @@ \lbrace 1,2\rbrace ~ \{1,2\}
    \frac{\pi}{2}+k\pi ~ k\pi+\frac{\pi}{2} @@ 1.0 ~ 1 @@ 1,5 ~ 5,1 @@ x<3 ~ (-\infty,3)
    -2\le x<3 ~ [-2,3) @@ x\lt3 ~ x<3 @@ 3>x ~ x<3 @@ \pm3 ~ 3,-3 @@ -3,3 ~ \pm 3 @@ x=\pm 3 ~ -3, 3
    \frac{-1\pm\sqrt5}{2} ~ \frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2} @@ 2x-y+1=0 ~ y=2x+1
    y=2x+1 ~ 2x+1 @@ 2x+1 ~ y=2x+1 @@ 2x+1 ~ f(x)=2x+1 @@ x^2/16+y^2/12=1/4 ~ x^2/4+y^2/3=1
    x=5 ~ y=5 @@ 1:2 ~ 2:4 @@ 1 ~ A:B=1 @@ 7:32 ~ S_{MBCN}:S=7:32 @@ 11:21 ~ V_{1}:V_{2}=11:21
    4,5 ~ AB=4,CD=5 @@ 3.0\times10^{8} ~ 300000000 @@ 3 \times 10^8 ~ 3e8
    \frac{3}{4} \text{ cup} ~ 3/4 @@ 12 \text{ ways} ~ 12 @@ \$15{,}000 ~ 15000
    \$15,\!000 ~ 15000 @@ -\$5 ~ -5 @@ 1\frac12 ~ 1.5 @@ 1 \frac{1}{2} ~ 3/2 @@ $\frac{1}{2}$ ~ 1/2
    \(\frac12\) ~ 1/2 @@ \[\frac12\] ~ 1/2 @@ \text{The answer is } 5 ~ \text{The answer is } 5
    \text{No solution} ~ no solutions @@ \varnothing ~ \emptyset @@ \text{DNE} ~ does not exist
    x^{2}+2x+1 ~ (x+1)^{2} @@ 2 \cdot 3 ~ 6 @@ 2^{10} ~ 1024 @@ 100! ~ 100!
    \overline{AB} ~ \overline{AB} @@ \frac{a}{b} ~ a/b
""")
WRONG = pairs(r"""
    13 ~ x^2+y^2=13 @@ 0 ~ ax^2+bx+c=0 @@ 0 ~ a^2+b=0 @@ 42 ~ m+n=42 @@ 1 ~ xy=1 @@ 0 ~ ab=0
    2 ~ \frac{x}{y}=2 @@ 5 ~ |x|+|y|=5 @@ 1 ~ \sqrt{x}+\sqrt{y}=1 @@ 1 ~ \sin x+\cos y=1
    0 ~ \lambda x+\mu y=0 @@ c ~ ax+by=c @@ 0 ~ x+y=0 @@ 180 ~ A+B+C=180 @@ y ~ x^2=y
    c^2 ~ a^2+b^2=c^2 @@ 0 ~ xyz=0 @@ 24 ~ abcd=24 @@ 1 ~ \sin x = 1 @@ 1 ~ \sin(x) = 1
    1 ~ \cos\theta=1 @@ 2 ~ \ln x = 2 @@ 3 ~ |x|=3 @@ 4 ~ \sqrt{x}=4 @@ 6 ~ 2x=6 @@ 1 ~ 4xy = 1
    1 ~ x^2=1 @@ 1 ~ x_1x_2=1 @@ 1 ~ x_1+x_2=1 @@ 0 ~ x-y=0 @@ 0 ~ z\bar{z}=0
    3 ~ x \equiv 3 \pmod 7 @@ 3 ~ 3 \pmod 7 @@ 3 ~ n \equiv 3 \pmod{5}
    x\equiv 3\pmod 8 ~ x\equiv 3 \pmod 7 @@ x\equiv 4\pmod 7 ~ x\equiv 3 \pmod 7
    1 ~ x\equiv 1,3 \pmod 4 @@ 42 ~ x=42 \text{ or } x=43 @@ 42 ~ 42, 43 @@ 1.3 ~ 1/3
    \frac13\approx1.3 ~ 1.3 @@ \pi \approx 3.14 ~ 3 @@ \sqrt2\approx 1.414 ~ 1.5 @@ x\approx 11 ~ 12
    x\ne 3 ~ 3 @@ 3 ~ x\ne 3 @@ x\ne 3 ~ x=3 @@ x=3 ~ x\neq 3 @@ x\ne 3 ~ x\ne 4 @@ 32, 349 ~ 32349
    100, 200 ~ 100200 @@ (1,2) ~ (2,1) @@ x=5,y=8 ~ (8,5) @@ (x,y)=(8,5) ~ x = 5, y = 8
    p=5,q=2;p=7,q=2 ~ (5,2),(2,7) @@ p=5,q=2 ~ (5,2),(7,2) @@ 1,2,2 ~ 1,1,2 @@ 3,5 ~ (3,5)
    3 \text{ and } 5 ~ (3,5) @@ 5€ ~ \$5 @@ 5\text{ km} ~ 5\text{ miles}
    5\text{ m}^2 ~ 5\text{ m} @@ 5\text{ m}^2 ~ 5\text{ m}^3
    5\text{ square meters} ~ 5\text{ square feet} @@ 5\text{ km/h} ~ 5\text{ m/s}
    5\text{ cm}^3 ~ 5\text{ square units} @@ 50\% ~ 50\text{ m} @@ 5\text{th} ~ 5 @@ \text{61} ~ 62
    \text{6} 1 ~ 7 @@ (-infinity,5) ~ (infinity,5) @@ -\infty ~ \infty @@ infinity ~ 5
    \mathbb{R} ~ \mathbb{Z} @@ \mathbb{R} ~ (0,\infty) @@ 17 \bmod 5 = 3 ~ 2 @@ 5+6=12 ~ 12
    \{1,2\} ~ (1,2) @@ [1,2] ~ (1,2) @@ (1,2)\cup(3,4) ~ (1,4) @@ (1,2)\cap(3,4) ~ (1,2)\cup(3,4)
    x<1 \text{ and } x>3 ~ x<1\text{ or }x>3 @@ just 42 ~ 42 @@ not 42 ~ 42 @@ the answer is 42 ~ 42
    a ~ A @@ c ~ C @@ x ~ X @@ b ~ (B) @@ yes ~ no @@ True ~ False @@ 5.001 ~ 5 @@ 0.5\% ~ 0.5
    x+1=6 \implies x=5 ~ 6 @@ y=2x+1 ~ y=2x+2 @@ 2x+1 ~ 2x-1 @@ f(x)=2x ~ g @@ 1:2 ~ 2:1 @@ 12 ~ 1:2
    5\text{ or six} ~ 5 @@ 5\text{ factorial} ~ 5 @@ 5\text{ th} ~ 5 @@ 5 squared ~ 5
    2 thirds ~ 2 @@ 3 over four ~ 3 @@ 5 minus one ~ 5 @@ \{x \in \mathbb{Z} \mid x > 1\} ~ (1,\infty)
    10_2 ~ 10 @@ x>3 ~ x<3 @@ x \le 3 ~ x<3 @@ 3 ~ x<3 @@ 3 ~ x>3 @@ (3,\infty) ~ 3 @@ 5 ~ -5
    - 5 ~ 5 @@ \sqrt{x^2} ~ x @@ {1 \over 2} ~ 2 @@ \binom{5}{2} ~ \frac52 @@ 1,2,3 ~ 2,3
    \pm 3 ~ 3 @@ 3 ~ \pm 3 @@ (5,8) ~ (5,8),(8,5) @@ (5,8),(5,8) ~ (5,8),(8,5)
    \begin{cases}x=1\\y=2\end{cases} ~ (2,1)
""")


def test_an_answer_equals_the_gold_one_in_every_way_to_write_it():
    assert [pair for pair in RIGHT if not equivalent(*pair)] == []


def test_no_answer_that_only_looks_like_the_gold_one_is_right():
    assert [pair for pair in WRONG if equivalent(*pair)] == []


# Gold answers, and responses that give them or do not
GIVEN = {
    "42": [
        "Final answer: 42",
        "**Answer**: 42",
        "**Answer:** 42",
        "Answer: **42**.",
        "The answer is **42**.",
        "**Answer:** **42**.",
        "**The answer is 42**.",
        "The answer is **42** because 6*7=42.",
        "Answer: *42*",
        "Answer = 42",
        "The answer is 42.",
        "So the answer is 42",
        "$\\boxed{42}$",
        "\\boxed{ 42 }",
        "\\boxed{(42)}",
        "\\boxed{42,}",
        "\\boxed{\\mathrm{42}}",
        "\\boxed{\\mathbf{42}}",
        "\\boxed{\\textbf{42}}",
        "\\boxed{\\bf 42}",
        "\\boxed{{42}}",
        "\\boxed{$42$}",
        "\\boxed{\\(42\\)}",
        "\\boxed{x = 42}",
        "\\boxed{42}.",
        "\\boxed{\\large 42}",
        "\\boxed{\\Large{42}}",
        "\\boxed{\\underline{42}}",
        "\\mathbf{\\boxed{42}}",
        "\\boxed{42\\,}",
        "\\boxed{\\approx 42}",
        "\\boxed{\\sqrt{1764}}",
        "\\boxed{42 = 42}",
        "\\boxed{42.0}",
        "\\boxed{042}",
        "\\boxed{4.2e1}",
        "\\boxed{42}\\%",
        "\\boxed{42} cm",
        "# Answer\n42",
        "### Final Answer\n\n42",
        "## Answer: 42",
        "ANSWER: 42",
        "answer: 42",
        "Answer: 42 (since 6*7=42)",
        "Answer: **42**",
        "Answer: `42`",
        'Answer: "42"',
        "Answer: x=42",
        "Answer: about 42",
        "Answer: 42;",
        "Answer: $x = 42$.",
        "Answer:\n\n$$\n42\n$$",
        "Answer:\n\\[\n42\n\\]",
        "Answer: The value of $x+y$ is $42$.",
        "Answer: There are 42 such integers.",
        "Answer: There are $42$ such integers $n$.",
        "Answer: 42 integers",
        "Answer: $\\frac{84}{2}$",
        "Answer: 42, since 41 is odd",
        "<answer> 42 </answer>",
        "<answer>$42$</answer>",
        "<answer>\\boxed{42}</answer>",
        "<think>Answer: 41</think>Answer: 42",
        "<think>\\boxed{41}</think>\\boxed{42}",
        "\\boxed{41} so finally \\boxed{42}",
        "\\boxed{42}\n\n\\boxed{42}",
        "**\\boxed{42}**",
        "\\[\\boxed{42}\\] Therefore the answer is 42.",
        "Answer: 42\n\nTherefore, the final answer is 42.",
        "The answer is: $42$",
        "The final answer is $\\boxed{42}$. I hope it is correct.",
        "The answer to the question is 42.",
    ],
    "B": [
        "the correct answer is (B) 42",
        "Answer: B",
        "Answer: (B)",
        "Answer: B) 42",
        "Answer: B. 42",
        "Answer: option B",
        "Answer: The answer is B.",
        "Answer: B, since 5 > 3",
        "The answer is B because it is larger.",
        "Answer: **B**.",
    ],
    "(1,2)": ["Answer: $(1,2)$"],
    "3,5": [
        "Answer: $x=3$ or $x=5$",
        "Answer: $3$ and $5$",
        "Answer: 3 and 5",
        "Answer: $\\{3,5\\}$",
        "Answer: The solutions are 3 and 5.",
        "Answer: The solutions are $x=3$ and $x=5$.",
        "Answer: The roots are $3$ and $5$.",
        "the answers are 3 and 5.",
    ],
    "5,3": ["Answer: 3, 5"],
    "(1,2),(3,4)": ["Answer: The points are $(1,2)$ and $(3,4)$."],
    "45": ["Answer: $\\$45$", "Answer: 45 dollars", "Answer: $45.00"],
    "1234": ["Answer: 1,234", "Answer: $1{,}234$"],
    "50": ["Answer: 50%"],
    "50\\%": ["Answer: 50\\%"],
    "(1,2]": ["Answer: The interval is $(1,2]$."],
    "2x+1": ["Answer: $f(x)=2x+1$"],
    "Yes": ["Answer: yes"],
    "yes": ["Answer: Yes."],
    "3:30": ["Answer: 3:30 PM"],
    "2\\sqrt3": ["Answer: $2\\sqrt{3}$ cm", "Answer: The area is $2\\sqrt{3}$ square units."],
    "12": ["Answer: 12 for all n", "Answer: $n=12$ if k is even"],
    "34": [
        "Answer: $34$ (when $x=2$)",
        "Answer: The maximum is $34$, attained at $x=2$.",
        "Answer: the sum equals $34$",
        "Answer: we get $34$",
        "Answer: John has 34 apples.",
        "Answer: John needs 34 apples",
        "Answer: It takes 34 minutes.",
        "Answer: She earned $34.",
        "Answer: $34$ is the largest",
        "Final Answer: The final answer is $34$. I hope it is correct.",
    ],
    "2^{0.5}": ["Answer: 2**.5"],
    "1/2": ["Final Answer: The final answer is $\\frac{1}{2}$. I hope this is correct."],
}
NOT_GIVEN = {
    "42": [
        "\\boxed{42} \\boxed{43}",
        "\\boxed{0.42}",
        "\\boxed{-42}",
        "Answer: 41",
        "Answer: not 42",
        "Answer: 42 or 41",
        "Answer: between 41 and 42",
        "Answer: 41. (not 42)",
        "Answer: It is 41, not 42.",
        "Answer: 4 2",
        "Answer: 42!",
        "\\boxed{42",
        "\\boxed{42} and check \\boxed{41}",
        "\\boxed{42}$ and $\\boxed{43}",
        "No answer.",
        "I do not know the answer",
        "",
    ],
    "B": ["Answer: C", "Answer: A, since B is smaller"],
    "5": ["Answer: 5 hours and 3 minutes"],
    "34": ["Answer: The maximum value is 34 and the minimum value is 2.", "Answer: x^2 = 34"],
}
SCORERS = (math_reward, math_dapo, prime_math)


def test_the_robust_scorers_read_boxes_lines_and_sentences_alike():
    for responses, acc in ((GIVEN, 1.0), (NOT_GIVEN, 0.0)):
        cases = [
            (scorer, text, gold)
            for gold, texts in responses.items()
            for text in texts
            for scorer in SCORERS
        ]
        said = [
            (scorer.__name__, text, gold)
            for scorer, text, gold in cases
            if scorer.score(text, gold, {}, "robust").acc != acc
        ]
        assert said == []


JOINED = (
    r"$x = \boxed{3}$ or $x = \boxed{5}$",
    r"\boxed{3} \text{ and } \boxed{5}",
    r"\boxed{3} \quad \text{or} \quad \boxed{5}",
    r"\boxed{3}, \quad \boxed{5}",
    r"\boxed{3}; \boxed{5}",
    r"\(\boxed{3}\) and \(\boxed{5}\).",
    r"x_1=\boxed{3}, x_2=\boxed{5}",
    "\\[\\boxed{3}\\]\nand\n\\[\\boxed{5}\\]",
    "**$\\boxed{3}$** as well as **$\\boxed{5}$**",
    "\\boxed{x = 3}\n\n\\boxed{x = 5}",
)


def test_boxes_that_words_or_layout_join_are_one_list():
    for response in JOINED:
        for scorer in SCORERS:
            assert scorer.score(response, "3,5", {}, "robust").acc == 1.0, response
            assert scorer.score(response, "5", {}, "robust").acc == 0.0, response
    assert (
        math_reward.score(r"a = \boxed{3} \text{ and } b = \boxed{5}", "(3,5)", {}, "robust").acc
        == 1.0
    )
    for response in (
        r"\boxed{3}. Wait: \boxed{5}",
        r"\boxed{3} is not \boxed{5}",
        "\\boxed{5}\n\\boxed{5}",
    ):
        assert last_closed_box(response) == "5", response


def test_a_vote_keeps_units_and_moduli_apart():
    def voted(text):
        return math_reward.score(rf"\boxed{{{text}}}", "5", {}, "robust").pred

    assert voted("5 km") != voted("5 miles") and voted("x \\equiv 3 \\pmod 7") != voted(
        "x \\equiv 3 \\pmod 8"
    )
    assert voted("5\\text{ km}") == voted("5 kilometers") and voted("x=5") == voted("5") == "5"


SHORT = (
    ("São Paulo", "Sao Paulo"),
    ("Beyoncé", "Beyonce"),
    ("O'Brien", "OBrien"),
    ("St. Louis", "St Louis"),
    ("J.K. Rowling", "J. K. Rowling"),
    ("JK Rowling", "J.K. Rowling"),
    ("J K Rowling", "J.K. Rowling"),
    ("Washington, D.C.", "Washington DC"),
    ("Washington D.C.", "Washington, DC"),
    ("10,000", "10000"),
    ("½", "1/2"),
    ("5%", "5"),
    ("A*", "A"),
    ("An American in Paris", "American in Paris"),
    ("twenty-one", "21"),
    ("twenty one", "21"),
    ("1990s", "1990's"),
    ("O₂", "O2"),
    ("Straße", "Strasse"),
    ("Æsop", "Aesop"),
    ("œuvre", "oeuvre"),
    ("Łódź", "Lodz"),
    ("Đà Nẵng", "Da Nang"),
    ("Þór", "Thor"),
    ("naïve", "naive"),
    ("rock 'n' roll", "rock n roll"),
    ("Rock & Roll", "rock and roll"),
    ("AT&T", "AT & T"),
    ("R&B", "R & B"),
    ("Ph.D.", "PhD"),
    ("U.S.A.", "USA"),
    ("U.K", "UK"),
    ("Spider-Man", "Spider Man"),
    ("£5", "5"),
    ("Yahoo!", "Yahoo"),
    ("¿Qué?", "Que"),
    ("“Hey Jude”", "Hey Jude"),
    ("Paris (France)", "Paris France"),
    ("1.50", "1.5"),
    ("1000.0", "1000"),
    ("Ⅳ", "IV"),
    ("５０％", "50%"),
    ("ﬁve", "five"),
    ("Hawaiʻi", "Hawaii"),
    ("Qur'an", "Quran"),
    ("Jean‐Luc", "Jean-Luc"),
    ("Saint-Étienne", "Saint Etienne"),
    ("Kleenex®", "Kleenex"),
    ("Kleenex™", "Kleenex"),
    ("Hey Jude…", "Hey Jude"),
    ("東京", "東京"),
    ("the Beatles", "Beatles"),
    ("1st", "first"),
    ("3rd", "third"),
    ("five", "5"),
    ("$1.5 million", "1.5 million"),
    ("No. 1", "No 1"),
    ("#1", "1"),
    ("1984–85", "1984-85"),
    ("+3", "3"),
    ("Mr. Smith", "Mr Smith"),
    ("Smith, John", "Smith John"),
    ("John\nSmith", "John Smith"),
    ("vitamin C", "Vitamin C"),
    ("3,000,000", "3000000"),
    ("\u200bParis", "Paris"),
    ("Paris\xa0", "Paris"),
    ("PARIS", "paris"),
    ("'Paris'", "Paris"),
    ("*Paris*", "Paris"),
    ("**Paris**", "Paris"),
    ("Zürich", "Zurich"),
    ("Ærø", "Aero"),
    ("Nº 5", "No 5"),
    ("Beyoncé's", "Beyonces"),
    ("Schrödinger’s cat", "Schrodinger's cat"),
    ("Kraków", "Krakow"),
    ("ＡＢＣ", "ABC"),
    ("café", "café"),
    ("A.I.", "AI"),
    ("The A-Team", "A-Team"),
    ("A", "A"),
    ("$.50", "0.5"),
    ("שָׁלוֹם", "שלום"),
)
OTHER = (
    ("パリ", "バリ"),
    ("कल", "कुल"),
    ("ปู", "ปี"),
    ("-.5", "5"),
    (".22", "22"),
    ("World War II", "World War 2"),
    ("-5", "5"),
    ("C++", "C"),
    ("A+", "A"),
    ("10:30", "1030"),
    ("3/4", "34"),
    ("3-2", "32"),
    ("1,5", "15"),
    ("東京", "京都"),
    ("New York City", "New York"),
    ("Mt Everest", "Everest"),
    ("5", "6"),
    ("1.5 million", "15 million"),
    ("e-mail", "email"),
    ("1984/85", "198485"),
    ("3 °C", "3"),
    ("x2", "x 2"),
    ("Type A", "Type B"),
    ("Plan B", "Plan"),
    ("F#", "F"),
    ("Apollo 11", "Apollo 1 1"),
    ("Apollo 11", "Apollo 1"),
    ("3 000", "3000"),
    ("12:00", "12.00"),
    ("1.000", "1000"),
    ("US$5", "$5"),
    ("half", "1/2"),
    ("a", "the"),
    ("I", "1"),
)


def test_short_answers_are_read_without_what_does_not_tell_them_apart():
    def right(answer, gold):
        return qa_em.score(f"<answer>{answer}</answer>", {"target": [gold]}, {}, "robust").acc == 1

    assert [pair for pair in SHORT if not right(*pair)] == []
    assert [pair for pair in OTHER if right(*pair)] == []


def test_what_the_tests_of_other_graders_expect():
    """``peers.jsonl``: answers of the tests of 14 other graders, where a careful person agrees with
    them."""
    rows = [
        json.loads(line)
        for line in Path(__file__).with_name("peers.jsonl").read_text("utf-8").splitlines()
    ]
    mistakes = []
    for row in rows:
        answer, gold = row["answer"], row["gold"]
        if row["reader"] == "short":
            said = (
                qa_em.score(f"<answer>{answer}</answer>", {"target": gold}, {}, "robust").acc == 1
            )
        else:
            said = equivalent(last_closed_box(answer) or answer, last_closed_box(gold) or gold)
        if said != bool(row["right"]):
            mistakes.append((said, row))
    assert [row for said, row in mistakes if said] == []
    assert len(rows) > 250 and len(mistakes) <= 2, mistakes
