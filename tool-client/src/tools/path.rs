//! Paths as Node's `path.resolve` makes them: by their letters alone, without a look at any file system, which may be
//! another host's.

/// Resolves a path against a base. `.` and `..` are worked out, repeated and trailing slashes go. Where the base is not
/// absolute the result is relative, may begin with `..`, and is `.` where nothing is left.
pub(super) fn resolve(base: &[u8], path: &[u8]) -> Vec<u8> {
    let absolute = base.starts_with(b"/") || path.starts_with(b"/");
    let base = if path.starts_with(b"/") { b"" } else { base };
    let mut kept: Vec<&[u8]> = Vec::new();
    for segment in base.split(|byte| *byte == b'/').chain(path.split(|byte| *byte == b'/')) {
        match segment {
            b"" | b"." => {}
            b".." if kept.last().is_some_and(|last| *last != b"..") => {
                kept.pop();
            }
            b".." if absolute => {}
            _ => kept.push(segment),
        }
    }
    let joined = kept.join(&b'/');
    match (absolute, joined.is_empty()) {
        (true, _) => [b"/".as_slice(), &joined].concat(),
        (false, true) => b".".to_vec(),
        (false, false) => joined,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_resolve_as_in_node() {
        let cases = [
            ("/a/b", "c", "/a/b/c"),
            ("/a/b", "./c/../c/d", "/a/b/c/d"),
            ("/a/b", "..", "/a"),
            ("/a/b", "../../../..", "/"),
            ("/a/b", "", "/a/b"),
            ("/a/b/", ".", "/a/b"),
            ("/a//b/../c", "d//e/", "/a/c/d/e"),
            ("/", "x", "/x"),
            ("/a", "/b/./c/..", "/b"),
            ("/a", "...", "/a/..."),
            ("/a", "~", "/a/~"),
            ("/a", "b\\c", "/a/b\\c"),
            ("", "", "."),
            ("", "a/..", "."),
            ("", "a/../..", ".."),
            ("", "../a/../b", "../b"),
            ("a", "../../b", "../b"),
        ];
        for (base, path, resolved) in cases {
            assert_eq!(resolve(base.as_bytes(), path.as_bytes()), resolved.as_bytes(), "{base} {path}");
        }
        assert_eq!(resolve(b"/\xff", b"\xfe"), b"/\xff/\xfe");
    }

    proptest! {
        #[test]
        fn a_resolved_path_is_in_its_simplest_form(base in "/?([a.]{0,3}/){0,4}", path in "([a.]{0,3}/){0,4}[a.]{0,3}") {
            let resolved = resolve(base.as_bytes(), path.as_bytes());
            prop_assert_eq!(&resolve(b"", &resolved), &resolved);
            let text = String::from_utf8(resolved).expect("ASCII stays ASCII");
            prop_assert_eq!(text.starts_with('/'), base.starts_with('/') || path.starts_with('/'));
            prop_assert!(text == "/" || !text.ends_with('/'));
            prop_assert!(!text.contains("//"));
            prop_assert!(!text.starts_with('/') || text.split('/').all(|segment| segment != ".."));
        }
    }
}
