//! What is left of the daemon's environment for commands: by an allow-list, or without what looks like a credential.

use std::ffi::OsString;

use super::Settings;

/// A name, or the beginning of names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AllowedName {
    This(String),
    BeginningWith(String),
}

impl AllowedName {
    /// Reads `NAME` or `BEGINNING*`. The error ends the sentence that the text begins.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (name, all) = text.strip_suffix('*').map_or((text, false), |beginning| (beginning, true));
        if name.contains(['*', '=', '\0']) || (name.is_empty() && !all) {
            return Err("must be the name of a variable, or the beginning of names and one `*`".to_owned());
        }
        Ok(if all { Self::BeginningWith(name.to_owned()) } else { Self::This(name.to_owned()) })
    }
}

/// The environment for commands, of what the daemon has. A name that looks like a credential passes only if it is in the list as
/// it is: what begins like it does not tell that somebody wanted it.
pub(super) fn environment(own: &[(OsString, OsString)], allowed: Option<&[AllowedName]>) -> Vec<(OsString, OsString)> {
    let Some(allowed) = allowed else { return Settings::command_environment(own.iter().cloned()) };
    let named = |name: &OsString| allowed.iter().any(|one| matches!(one, AllowedName::This(this) if *name == **this));
    let begins = |name: &OsString| {
        let name = name.to_string_lossy();
        allowed.iter().any(|one| matches!(one, AllowedName::BeginningWith(start) if name.starts_with(start.as_str())))
    };
    let mut kept = Settings::command_environment(own.iter().filter(|(name, _)| named(name) || begins(name)).cloned());
    for (name, value) in own.iter().filter(|(name, _)| named(name)) {
        if kept.iter().all(|(there, _)| there != name) {
            kept.push((name.clone(), value.clone()));
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(own: &[&str], allowed: Option<&[&str]>) -> Vec<String> {
        let own: Vec<_> = own.iter().map(|name| (OsString::from(name), OsString::from("x"))).collect();
        let allowed: Option<Vec<_>> =
            allowed.map(|all| all.iter().map(|one| AllowedName::parse(one).expect("a name")).collect());
        let plain = ["NO_COLOR", "TERM", "PAGER", "GIT_PAGER"];
        let kept = environment(&own, allowed.as_deref());
        assert!(plain.iter().all(|name| kept.iter().any(|(there, value)| there == name && value != "x")));
        let names = kept.into_iter().map(|(name, _)| name.to_string_lossy().into_owned());
        names.filter(|name| !plain.contains(&name.as_str())).collect()
    }

    #[test]
    fn only_what_is_allowed_is_left() {
        let own = ["PATH", "LC_ALL", "LC_API_KEY", "LANG", "MY_TOKEN", "TERM", "LC"];
        assert_eq!(kept(&own, None), ["PATH", "LC_ALL", "LANG", "LC"]);
        assert_eq!(kept(&own, Some(&["PATH", "LC_*"])), ["PATH", "LC_ALL"]);
        assert_eq!(kept(&own, Some(&["MY_TOKEN", "TERM"])), ["MY_TOKEN"], "one that was named is wanted");
        assert_eq!(kept(&own, Some(&["*"])), ["PATH", "LC_ALL", "LANG", "LC"]);
        assert_eq!(kept(&own, Some(&[])), [""; 0]);
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in ["", "A=B", "*A", "A*B", "A**"] {
            AllowedName::parse(text).expect_err(text);
        }
    }
}
