package cli

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	// sourcePath is a file or folder of the source in a page.
	sourcePath = regexp.MustCompile("`((?:api|bpf|cmd|deploy|internal|test)/[A-Za-z0-9_./*-]+)`")
	// sourceName is a file without its folder.
	sourceName = regexp.MustCompile("`([a-z0-9_]+\\.(?:c|h|go))`")
	// placed is an identifier and the file that contains it: `name` (`file`).
	placed = regexp.MustCompile("`([A-Za-z_][A-Za-z0-9_.]*)`\\s+\\((?:both\\s+)?`([A-Za-z0-9_./-]+\\.(?:h|c|go))`")
)

// TestArchitecture checks that the files that ARCHITECTURE.md and the explanations name exist, and that functions are
// in the files that ARCHITECTURE.md names for them.
func TestArchitecture(t *testing.T) {
	must := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	root := filepath.Join("..", "..")
	var sources []string
	for _, folder := range []string{"bpf", "cmd", "internal"} {
		must(t, filepath.WalkDir(filepath.Join(root, folder), func(path string, _ fs.DirEntry, err error) error {
			if ext := filepath.Ext(path); ext == ".go" || ext == ".h" || ext == ".c" {
				sources = append(sources, path)
			}
			return err
		}))
	}
	pages, err := filepath.Glob(filepath.Join(root, "docs", "explanation", "*.md"))
	must(t, err)
	paths, names := 0, 0
	for _, page := range append(pages, filepath.Join(root, "ARCHITECTURE.md")) {
		b, err := os.ReadFile(page)
		must(t, err)
		for _, m := range sourcePath.FindAllStringSubmatch(string(b), -1) {
			paths++
			found, err := filepath.Glob(filepath.Join(root, m[1]))
			must(t, err)
			if found == nil && !strings.Contains(m[1], "NAME") {
				t.Errorf("%s names %s, which does not exist", page, m[1])
			}
		}
		for _, m := range sourceName.FindAllStringSubmatch(string(b), -1) {
			paths++
			if !slices.ContainsFunc(sources, func(path string) bool { return filepath.Base(path) == m[1] }) {
				t.Errorf("%s names %s, which does not exist", page, m[1])
			}
		}
		for _, m := range placed.FindAllStringSubmatch(string(b), -1) {
			names++
			name := regexp.MustCompile(`\b` + m[1][strings.LastIndex(m[1], ".")+1:] + `\b`)
			if !slices.ContainsFunc(sources, func(path string) bool {
				if !strings.HasSuffix(path, "/"+m[2]) {
					return false
				}
				text, err := os.ReadFile(path)
				must(t, err)
				return name.Match(text)
			}) {
				t.Errorf("%s: no %s in %s", page, m[1], m[2])
			}
		}
	}
	if paths < 50 || names < 20 {
		t.Errorf("found %d paths and %d names with their files, want at least 50 and 20", paths, names)
	}
	t.Logf("%d paths, %d names with their files", paths, names)
}
