//! A check for expressions that browsers refuse. WGSL's grammar defines no precedence between
//! shifts, bitwise operators and others: `a >> 8u & 1u` needs brackets. naga accepts it without.

/// Operators of one bracket level, between two separators.
#[derive(Debug, Default)]
struct Level {
    operators: Vec<&'static str>,
    /// Whether an operand precedes the next operator; a `-` without one is a sign.
    has_operand: bool,
}

const OPERATORS: &[&str] = &[
    "<<=", ">>=", "<<", ">>", "&&", "||", "==", "!=", "<=", ">=", "->", "+=", "-=", "*=", "/=",
    "%=", "&=", "|=", "^=", "++", "--", "+", "-", "*", "/", "%", "&", "|", "^", "<", ">", "=", ",",
    ";", ":", "{", "}",
];
/// Tokens that end an expression.
const SEPARATORS: &[&str] = &[
    "<<=", ">>=", "->", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "++", "--", "=", ",", ";",
    ":", "{", "}",
];
/// Names that may be followed by types in angle brackets.
const TEMPLATES: &[&str] = &["vec2", "vec3", "vec4", "array", "atomic", "bitcast", "ptr", "var"];

impl Level {
    /// Returns operators that need brackets between them, and clears the level.
    fn end(&mut self) -> Option<String> {
        let operators = std::mem::take(&mut self.operators);
        self.has_operand = false;
        let any = |of: &[&str]| operators.iter().any(|operator| of.contains(operator));
        let shifts = operators.iter().filter(|operator| ["<<", ">>"].contains(*operator)).count();
        let bitwise: Vec<_> = ["&", "|", "^"].into_iter().filter(|of| any(&[of])).collect();
        let sums = any(&["+", "-", "*", "/", "%"]);
        let others = sums || any(&["==", "!=", "<", ">", "<=", ">=", "&&", "||"]);
        let is_mixed = shifts > 1
            || (shifts > 0 && (sums || !bitwise.is_empty()))
            || bitwise.len() > 1
            || (!bitwise.is_empty() && others)
            || (any(&["&&"]) && any(&["||"]));
        is_mixed.then(|| operators.join(" "))
    }
}

/// Finds the first line with operators that need brackets, and returns these.
pub(super) fn first_mixed(source: &str) -> Option<(usize, String)> {
    let mut levels = vec![Level::default()];
    for (number, line) in (1..).zip(source.lines()) {
        let mut rest = line.split("//").next().unwrap_or_default();
        while !rest.is_empty() {
            let Some(level) = levels.last_mut() else { return Some((number, ")".to_owned())) };
            let word = rest.chars().take_while(|c| c.is_alphanumeric() || "_.$@".contains(*c));
            let word = word.map(char::len_utf8).sum::<usize>();
            if word > 0 {
                let (name, after) = rest.split_at(word);
                level.has_operand = !["return", "if", "while", "case", "switch"].contains(&name);
                rest = if TEMPLATES.contains(&name) { skip_types(after) } else { after };
                continue;
            }
            let operator = OPERATORS.iter().find(|operator| rest.starts_with(**operator));
            let found = match operator {
                Some(separator) if SEPARATORS.contains(separator) => level.end(),
                Some(operator) => {
                    if std::mem::replace(&mut level.has_operand, false) {
                        level.operators.push(operator);
                    }
                    None
                }
                None if rest.starts_with(['(', '[']) => {
                    level.has_operand = true;
                    levels.push(Level::default());
                    None
                }
                None if rest.starts_with([')', ']']) => {
                    let found = level.end();
                    levels.pop();
                    found
                }
                None => None,
            };
            if let Some(operators) = found {
                return Some((number, operators));
            }
            let next = rest.chars().next().map_or(1, char::len_utf8);
            rest = rest.get(operator.map_or(next, |operator| operator.len())..).unwrap_or_default();
        }
    }
    None
}

/// Skips types in angle brackets.
fn skip_types(rest: &str) -> &str {
    if !rest.starts_with('<') {
        return rest;
    }
    let mut depth = 0_i32;
    for (at, c) in rest.char_indices() {
        depth = depth + i32::from(c == '<') - i32::from(c == '>');
        if depth == 0 {
            return rest.get(at + 1..).unwrap_or_default();
        }
    }
    rest
}

#[test]
fn operators_that_need_brackets_are_found() {
    for wrong in [
        "let a = b >> 8u & 1u;",
        "let a = b << 1u << 2u;",
        "return f(x + y << 2u);",
        "a[i & 1u + j] = 0u;",
        "let a = b\n    | c & d;",
        "if a & b == c {",
        "let a = x < y & z < w;",
        "let a = b && c || d;",
    ] {
        assert!(first_mixed(wrong).is_some(), "{wrong}");
    }
    for right in [
        "let a = (b >> 8u) & 1u;",
        "let a: array<vec4<u32>, 8> = array<vec4<u32>, 8>();",
        "atomicAnd(&plane[i >> 2u], ~mask);",
        "let a = -b + c * -d;",
        "let a = b | c | d; // e & f | g",
        "if a << 2u < b && c == d {",
        "a |= b << 2u;",
    ] {
        assert_eq!(first_mixed(right), None, "{right}");
    }
}
