"""Which written answers are the same: by value, by sympy and by math-verify."""

from __future__ import annotations

import re

import pytest
from sympy.parsing import sympy_parser

from results.rewards import scorers
from reward_scores import geo3k, gsm8k, math_dapo, math_reward, prime_math, symbolic
from reward_scores.equivalence import equivalent
from reward_scores.expressions import ratio, same_value
from reward_scores.symbolic import math_verify_equal, same_formula

NUMBER = r"(Integer|Float) ?\('?[\d.]+'? ?\)"  # what math-verify may let sympy evaluate


def pairs(text: str) -> list[tuple[str, str]]:
    """Read ``one ~ other`` a line, or several a line between semicolons."""
    every = [
        each for line in text.splitlines() for each in re.split(r"\s+;\s+", line) if each.strip()
    ]
    return [tuple(side.strip() for side in each.split(" ~ ")) for each in every]


# By value and by math-verify alike
SAME = pairs(r"""
    5² ~ 25 ; 2x² ~ 2x^2 ; ½ ~ \frac12 ; -2½ ~ -2.5 ; 10⁻³ ~ 0.001 ; a₁ ~ a_1 ; 101₂ ~ 101_2 ; H₂O ~ \text{H2O}
    –3 ~ -3 ; 30º ~ 30 ; 2·3 ~ 6 ; 6÷2 ~ 3 ; 2√3 ~ \sqrt{12} ; (−∞,π] ~ (-\infty,\pi]
    2**3 ~ 8 ; 2 1/2 ~ 2.5 ; 10\,000 ~ 10000 ; 1/2^60 ~ \frac{1}{2^{60}} ; 5\times10^{-20} ~ 5e-20
    50\% ~ 50 ; 50 percent ~ 0.5 ; 150\% ~ 1.5 ; 10\%, 20\% ~ 20, 10
    y=2x+1 ~ 2x-y+1=0 ; 2y=4x+2 ~ y=2x+1 ; 5=x ~ x=5 ; x=2+3=5 ~ 5 ; f(x)=2x+1 ~ y=2x+1
    \theta=30^\circ ~ 30 ; (x,y)=(1,2) ~ (1,2) ; 5=x ~ 5 ; x=±2 ~ -2, 2
    x<3 ~ (-\infty,3) ; 3>x ~ x<3 ; -2x>-6 ~ x<3 ; 1<x\le 3 ~ (1,3] ; x\in[3,+\infty) ~ x≥3
    \{x\mid x<3\} ~ (-\infty,3) ; y<2x+1 ~ 2x-y+1>0
    (3,\infty)\cup(-\infty,1) ~ (-\infty,1)\cup(3,\infty) ; x<1\text{ or }x>3 ~ (-\infty,1)\cup(3,\infty)
    2, 1 ~ \{1,2\} ; (1,2),(3,4) ~ (3,4),(1,2) ; x=1\text{ or }x=2 ~ 2,1
    \left(\begin{array}{c}1\\2\end{array}\right) ~ \begin{pmatrix}1\\2\end{pmatrix}
    \begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{bmatrix}1&2\\3&\frac{8}{2}\end{bmatrix}
""")
DIFFERENT = pairs(r"""
    5² ~ 52 ; 2½ ~ 21 ; ½ ~ 1 ; 10⁻³ ~ 10-3 ; –3 ~ 3 ; 30º ~ 300 ; m² ~ m2 ; 2 1/2 ~ 21/2 ; 1 2 ~ 12 ; 2**3 ~ 23
    0.333... ~ 0.333 ; 1/2^60 ~ 1/2^61 ; 0.0000000000001 ~ 0.0000000000002 ; \frac{\pi}{10^{20}} ~ \frac{\pi}{10^{21}}
    e^{-40} ~ e^{-41} ; (0,10^{-20}) ~ (0,10^{-21}) ; \frac{x}{2^{60}} ~ \frac{x}{2^{61}} ; x+10^{-20} ~ x
    \begin{pmatrix}10^{-20}\end{pmatrix} ~ \begin{pmatrix}10^{-21}\end{pmatrix}
    0.5\% ~ 0.5 ; 0.5\text{ percent} ~ 0.5 ; 1\% ~ 1 ; 5\% ~ 500 ; (0.5\%,1) ~ (0.5,1)
    y=2x+1 ~ 2x-y=0 ; 2x-y+1=0 ~ 0 ; x+2=7 ~ 7 ; 2+3=6 ~ 6 ; x=5, y=6 ~ x=6, y=5 ; x<3 ~ (-\infty,3]
    x<3 ~ x>3 ; x<3 ~ y<3
    x<1\text{ or }x>3 ~ x<1\text{ and }x>3 ; (-\infty,1)\cup(3,\infty) ~ (-\infty,1)\cup[3,\infty)
    (1,2) ~ (2,1) ; (1,2) ~ \{2,1\} ; 12 ~ 1, 2 ; 1 ~ 100 ; (0,1] ~ [0,1] ; 3 ~ 4
    \begin{pmatrix}1&2&3&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
""")
# Those that a scorer must find in a box or a line
WRITTEN = pairs(r"""
    1,000 ~ 1000 ; 34\% ~ 34 ; 34. ~ 34 ; \frac{2}{4} ~ \frac12 ; 2\sqrt{2} ~ \sqrt{8} ; 1+x ~ x+1
    \text{even} ~ Even ; \{1,2\} ~ \{2,1\} ; x=5 ~ 5 ; 5\text{ cm} ~ 5 ; 5\mbox{ cm}^2 ~ 5 ; -\frac34 ~ \frac{-3}{4}
    2\frac12 ~ 2.5 ; −5 ~ -5 ; \sqrt[3]{8} ~ 2 ; (x+1)(x-1) ~ x^2-1 ; 90^\circ ~ 90 ; 5! ~ 120
    \left[0,\frac{1}{2}\right) ~ [0, 0.5) ; 10^{10} ~ 10000000000 ; \pi r^2 ~ r^2\pi ; $12$ ~ \$12 ; 2, 1 ~ 1, 2
""")
UNLIKE = pairs(r"""
    \$ ~ \$ ; (2,1) ~ (1,2) ; [0,1) ~ [0,1] ; 1,2 ~ 12 ; 1, 2 ~ 12 ; 0.01 ~ 1 ; yes ~ sey ; \sqrt{x^2} ~ x
    \pi ~ 3.14159 ; 9^{9^{9^9}} ~ 1 ; \cos 13^\circ ~ 13 ; \log x ~ \ln x ; \lim 3 ~ 3 ; 2\frac{1}{2} ~ 1
    3\text{ or }5 ~ 3 ; 1/0 ~ 1/0+1 ; x^2 ~ x^3 ; x+y ~ x-y ; 1,2,2 ~ 1,1,2
    ((((((1,2),1),1),1),1),1),1 ~ ((((((1,3),1),1),1),1),1),1
""")
VERIFIED = pairs(r"""
    1,000 ~ 1000 ; \$5.50 ~ 5.5 ; 5\text{ cm} ~ 5 ; \frac{3}{6} ~ 0.5 ; x^2+2x+1 ~ (x+1)^2
    \{2,1\} ~ \{1,2\} ; \sin^2 x+\cos^2 x ~ 1 ; x=5 ~ 5 ; \text{Evelyn} ~ \text{Evelyn}
    \begin{pmatrix}1\\ \frac{1}{2}\end{pmatrix} ~ \begin{pmatrix}1\\0.5\end{pmatrix}
""")


def test_the_same_in_another_spelling_and_what_is_not_the_same():
    assert [pair for pair in SAME if not (equivalent(*pair) and equivalent(*pair[::-1]))] == []
    assert [pair for pair in DIFFERENT if equivalent(*pair) or equivalent(*pair[::-1])] == []
    assert not equivalent("", "")


@pytest.mark.parametrize("reader", scorers.READERS)
def test_the_robust_readers_on_the_published_pairs(reader):
    wrong = list(scorers.mistakes(reader, scorers.READERS[reader]["robust"]))
    size = sum(row["reader"] == reader for row in scorers.pairs())
    # A right one that is wrong trains a policy to write it
    assert [row for row, said in wrong if said] == []
    assert len(wrong) <= 0.02 * size, wrong


def test_the_robust_scorers_find_an_answer_and_compare_it_by_value():
    for one, other in WRITTEN:
        assert equivalent(one, other) and equivalent(other, one), (one, other)
        assert math_reward.score(f"so \\boxed{{{one}}}", other, {}, "robust").acc == 1.0, (
            one,
            other,
        )
        assert math_dapo.score(f"**Answer:** {one}", other, {}, "robust").acc == 1.0, (one, other)
        assert prime_math.score(f"so \\boxed{{{one}}}", other, {}, "robust").acc == 1.0, (
            one,
            other,
        )
    deep = [f"{'(1,' * 400}{end}{')' * 400}" for end in "23"]
    for one, other in [*UNLIKE, tuple(deep)]:
        assert not equivalent(one, other) and not equivalent(other, one), (one, other)
        assert math_reward.score(f"so \\boxed{{{one}}}", other, {}, "robust").acc == 0.0, (
            one,
            other,
        )


def test_the_scorers_compare_by_math_verify_where_they_are_told():
    for one, other in VERIFIED:
        assert math_verify_equal(one, other), (one, other)
        for module in (math_reward, prime_math):
            assert module.score(f"so \\boxed{{{one}}}", other, {}, "math_verify").acc == 1.0, (
                module,
                one,
            )
        assert math_dapo.score(f"**Answer:** {one}", other, {}, "math_verify").value == 1.0, one
        assert (
            geo3k.score(f"<think>t</think> \\boxed{{{one}}}", other, method="math_verify").value
            == 1.0
        ), one
    assert math_reward.score("\\boxed{5²}", "52", {}, "robust").acc == 0.0
    assert math_dapo.score("Answer: 2½", "2.5", {}, "robust").acc == 1.0
    assert math_reward.score("\\boxed{x=5}", "5", {}, "robust").pred == "5"  # what maj@k votes on


def test_formulas_are_compared_exactly_where_they_can_be():
    for one, other in pairs("""
        2x(x+1) ~ 2x^2 + 2 x ; -x^2 ~ -(x^2) ; 2^3^2 ~ 512 ; 2^-1 ~ 0.5 ; 1/2x ~ x/2 ; sqrt(9/4) ~ 1.5
        1e3 ~ 1000 ; (x+y)^2/(x+y) ~ x+y ; x^400*x ~ x^401
    """):
        assert same_value(one, other), (one, other)
    for one, other in pairs("-x^2 ~ (-x)^2 ; x+10^(-20) ~ x ; sqrt(x^2) ~ x"):
        assert not same_value(one, other), (one, other)
    for broken in (
        "",
        "1+",
        "(1",
        "1)",
        "2**",
        "import",
        "!",
        "9^9^9^9",
        "1e99999",
        "10!!!",
        "x" * 600,
        "(" * 300,
    ):
        assert not same_value(broken, broken), broken
    assert ratio("2x-2y", "y-x") == -2 and ratio("x-5", "y-5") is None and ratio("0*x", "x") is None


def test_no_text_is_evaluated_as_code(monkeypatch):
    """sympy's parser evaluates: from here nothing reaches it but, through math-verify's grammar,
    numbers."""
    symbolic.warm_sympy()
    symbolic.warm_math_verify()
    evaluated, parse = [], sympy_parser.eval_expr
    monkeypatch.setattr(
        sympy_parser, "eval_expr", lambda code, *rest: evaluated.append(code) or parse(code, *rest)
    )
    code = "__import__('os').system('true')"
    for text in (
        "1+6+1",
        code,
        f"1+{code}",
        f"\\text{{{code}}}",
        f"\\frac{{1}}{{{code}}}",
        f"\\sqrt[{code}]{{2}}",
    ):
        assert not same_formula(text, "7") and not math_verify_equal(text, "7")
    assert evaluated and all(re.fullmatch(NUMBER, each) for each in evaluated), evaluated
    evaluated.clear()
    assert same_formula("1+6", "7") and not evaluated
    assert math_verify_equal("1+6", "7") and math_verify_equal("\\frac{1.5}{3}", "0.5")


def test_gsm8k_robust_reads_what_a_reader_would_and_is_not_generous():
    right = {
        "72": "#### 72. ; #### $72 ; #### **72** ; ####72 ; #### 72.0 ; #### +72 ; #### "
        "\uff17\uff12 ; "
        "#### \\boxed{72} ; It is \u2014 in all \u2014 72",
        "-5": "#### \u22125 ; #### - 5 ; #### -$5",
        "5": "that is 7 - 2 = 5 ; #### 7 - 2 = 5 ; from 3\u20135 ; The area is 5 m\u00b2",
        "2.5": "#### 2\u00bd cups",
        "0.5": "#### .5 ; #### 50%",
        "10": "#### 10 20",
        "1.5": "#### 1 1/2",
        "5000": "#### \u22485\u00d710\u00b3",
        "1000": "#### 1\u00a0000 ; #### 1'000",
        "1234": "It is 1,234.",
        "1,234": "#### 1,234",
    }
    for gold, responses in right.items():
        assert gsm8k.check_ground_truth(gold, "robust") is None
        for response in responses.split(" ; "):
            assert gsm8k.score(response, gold, {}, "robust").acc == 1.0, (response, gold)
    assert gsm8k.score("#### 72" + " " * 400, 72, {}, "robust").acc == 1.0
    for response, gold in (
        *(
            ("#### 7", "72"),
            ("#### 72\n#### 1", "72"),
            ("#### -72", "72"),
            ("#### 7.2", "72"),
            ("#### 3/4", "3"),
        ),
        *(
            ("#### 10 20", "20"),
            ("The area is 5 m^2", "2"),
            ("#### 0.5%", "0.5"),
            ("#### 7 - 2 = 5", "7"),
        ),
    ):
        assert gsm8k.score(response, gold, {}, "robust").acc == 0.0, (response, gold)
