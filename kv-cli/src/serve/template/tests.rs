//! Templates beside their output in transformers, recorded by `tests/data/make_chats.py`.
use std::collections::BTreeMap;

use chrono::NaiveDateTime;
use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Recorded {
    schema: String,
    provenance: Provenance,
    tokens: BTreeMap<String, String>,
    chats: BTreeMap<String, Vec<Given>>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Provenance {
    transformers: String,
    now: String,
}

#[derive(Deserialize)]
struct Given {
    role: String,
    content: String,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    chat: String,
    /// The prompt; `None` if the template refuses.
    prompt: Option<String>,
    refusal: Option<String>,
}

/// Beginning of the names of cases that this engine lacks or writes in another way.
const OTHER: &str = "other_";

fn recorded() -> Recorded {
    let text = include_str!("../../../tests/data/chats.json");
    let recorded: Recorded = serde_json::from_str(text).expect("the recorded file");
    assert_eq!(recorded.schema, "chat-templates/1");
    assert!(!recorded.provenance.transformers.is_empty());
    recorded
}

fn clock(now: NaiveDateTime) -> Clock {
    Arc::new(move || now)
}

/// Returns the difference of a case.
fn difference(recorded: &Recorded, case: &Case) -> Option<String> {
    let given = &recorded.chats[&case.chat];
    let message =
        |given: &Given| Message { role: given.role.clone(), content: given.content.clone() };
    let messages: Vec<_> = given.iter().map(message).collect();
    let clock = clock(recorded.provenance.now.parse().expect("a time"));
    let template = Template::parse(&case.template, recorded.tokens.clone(), clock);
    let got = template.and_then(|template| template.prompt(&messages));
    match (&case.prompt, &case.refusal, &got) {
        (Some(expected), _, Ok(got)) if expected == got => None,
        (None, Some(_), Err(TemplateError::Unsupported(_))) if case.name.starts_with("broken") => {
            None
        }
        // The template's own words arrive.
        (None, Some(words), Err(TemplateError::Messages(error)))
            if case.name.starts_with("broken") || error.to_string().contains(words) =>
        {
            None
        }
        (prompt, refusal, got) => {
            let expected = prompt.as_ref().or(refusal.as_ref());
            Some(format!("{}: expected {expected:?}, got {got:?}", case.name))
        }
    }
}

#[test]
fn templates_are_rendered_as_transformers_does() {
    let recorded = recorded();
    assert!(recorded.cases.len() > 150, "{} cases", recorded.cases.len());
    let is_other = |case: &&Case| case.name.starts_with(OTHER);
    let (others, cases): (Vec<_>, Vec<_>) = recorded.cases.iter().partition(is_other);
    let wrong: Vec<_> = cases.iter().filter_map(|case| difference(&recorded, case)).collect();
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
    let right = others.iter().find(|case| difference(&recorded, case).is_none());
    assert_eq!(right.map(|case| &case.name), None, "the engine has it now");
}

fn parse(source: &str) -> Result<Template, TemplateError> {
    let now = NaiveDateTime::default();
    Template::parse(source, BTreeMap::new(), clock(now))
}

#[test]
fn what_is_not_supported_is_found_before_a_request() {
    for (source, words) in [
        ("{% for %}", "syntax error"),
        ("{% frobnicate %}", "frobnicate"),
        ("{% generation %}never closed", "syntax error"),
        ("{{ frobnicate(messages) }}", "frobnicate"),
        ("{{ messages | frobnicate }}", "frobnicate"),
        ("{{ messages is frobnicate }}", "frobnicate"),
        ("{{ messages[0].content.frobnicate() }}", "frobnicate"),
    ] {
        let error = parse(source).expect_err("refused").to_string();
        assert!(error.contains(words) && error.contains("not supported"), "{source}: {error}");
    }
}

#[test]
fn a_template_may_refuse_the_first_message_that_is_tried() {
    let source = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}\
        {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}";
    let template = parse(source).expect("supported");
    let message = |role: &str| Message { role: role.to_owned(), content: "x".to_owned() };
    let refused = template.prompt(&[message("user")]).expect_err("refused");
    assert!(matches!(&refused, TemplateError::Messages(_)), "{refused:?}");
    assert!(refused.to_string().contains("system first"), "{refused}");
    assert_eq!(template.prompt(&[message("system")]).expect("renders"), "x");
}

#[test]
fn a_value_that_is_nested_without_end_is_refused() {
    let source = "{% set ns = namespace(x=[]) %}{% for i in range(300) %}{% set ns.x = [ns.x] %}\
        {% endfor %}{{ ns.x | tojson | length }}";
    let template = parse(source).expect("supported");
    let message = Message { role: "user".to_owned(), content: String::new() };
    let refused = template.prompt(&[message]).expect_err("refused").to_string();
    assert!(refused.contains("nested"), "{refused}");
}
