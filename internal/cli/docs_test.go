package cli

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/dropreason"
)

// words splits a command line as a shell does, up to a comment.
func words(line string) []string {
	var all []string
	for _, w := range regexp.MustCompile(`'[^']*'|"[^"]*"|(?:\$\([^)]*\)|[^\s'"])+`).FindAllString(line, -1) {
		if w == "#" || w == "|" || w == ">" || w == "&&" || w == "&" {
			break
		}
		if w != "--help" { // every command takes it
			all = append(all, strings.Trim(w, `'"`))
		}
	}
	return all
}

// understood returns an error if a command line is invalid. If mention is true, required arguments and flags may be
// missing.
func understood(line string, mention bool) error {
	c, rest, err := newRoot(Env{}).Find(words(line)[1:])
	if err != nil {
		return err
	}
	if err := c.ParseFlags(rest); err != nil || mention {
		return err
	}
	if err := c.ValidateRequiredFlags(); err != nil {
		return err
	}
	return c.ValidateArgs(c.Flags().Args())
}

var (
	block   = regexp.MustCompile("(?ms)^```[^\n]*\n(.*?)^```$")
	mention = regexp.MustCompile("`(pilaster [^`]*)`")
	target  = regexp.MustCompile(`\]\(([^)#:]*)(#[^)]*)?\)`)
	heading = regexp.MustCompile(`(?m)^#{1,6} (.*)$`)
)

// Lower bounds for the numbers of items that the tests find in the pages, without the generated command reference. So a
// test fails if pages have moved to a place that it does not read.
const (
	minPages    = 75
	minTyped    = 95
	minMentions = 150
	minLinks    = 150
	minNames    = 60 // names of pages in sources
)

// pages returns the text of every Markdown page by its path: all of docs/ and those at the root of the repository,
// except the changelog, which names commands of its time.
func pages(t *testing.T) map[string]string {
	t.Helper()
	root := filepath.Join("..", "..")
	paths := []string{
		filepath.Join(root, "README.md"),
		filepath.Join(root, "CONTRIBUTING.md"),
		filepath.Join(root, "ARCHITECTURE.md"),
	}
	err := filepath.WalkDir(filepath.Join(root, "docs"), func(path string, _ fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".md" {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) < minPages {
		t.Fatalf("found %d pages, want at least %d: %q", len(paths), minPages, paths)
	}
	texts := map[string]string{}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		texts[path] = string(b)
	}
	for _, folder := range []string{"howto", "reference", "results"} {
		if !slices.ContainsFunc(
			paths,
			func(p string) bool { return strings.HasPrefix(p, filepath.Join(root, "docs", folder)+"/") },
		) {
			t.Errorf("docs/%s has no page", folder)
		}
	}
	return texts
}

// written returns 0 for a generated page, and 1 for all other pages.
func written(path string) int {
	if filepath.Dir(path) == referenceFolder {
		return 0
	}
	return 1
}

// TestDocsCommands checks that all commands and flags on the pages exist, and that commands in code blocks are
// complete.
func TestDocsCommands(t *testing.T) {
	typed, mentioned := 0, 0
	for path, text := range pages(t) {
		for _, b := range block.FindAllStringSubmatch(text, -1) {
			for line := range strings.Lines(b[1]) {
				line = strings.TrimPrefix(strings.TrimSpace(line), "$ ")
				if !strings.HasPrefix(line, "pilaster ") {
					continue
				}
				typed += written(path)
				if err := understood(line, false); err != nil {
					t.Errorf("%s: %s: %v", path, line, err)
				}
			}
		}
		for _, m := range mention.FindAllStringSubmatch(block.ReplaceAllString(text, ""), -1) {
			mentioned += written(path)
			if err := understood(m[1], true); err != nil {
				t.Errorf("%s: `%s`: %v", path, m[1], err)
			}
		}
	}
	t.Logf("%d commands in code blocks, %d in text", typed, mentioned)
	if typed < minTyped || mentioned < minMentions {
		t.Errorf("found %d commands in code blocks and %d in text, want at least %d and %d",
			typed, mentioned, minTyped, minMentions)
	}
	for _, wrong := range []string{"pilaster nonsense", "pilaster status --nonsense", "pilaster explain",
		"pilaster agent --uplink eth0", "pilaster tenant nonsense"} {
		if understood(wrong, false) == nil {
			t.Errorf("%q: no error, want one", wrong)
		}
	}
}

// TestExamples checks that every command and every family of commands has an example, and that the examples are valid
// commands.
func TestExamples(t *testing.T) {
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			visit(sub)
		}
		if c.Hidden || c.Name() == "help" || c.HasParent() && c.Parent().Name() == "completion" {
			return
		}
		found := 0
		for line := range strings.Lines(c.Example) {
			if line = strings.TrimSpace(line); !strings.HasPrefix(line, "pilaster ") {
				continue
			}
			found++
			if err := understood(line, false); err != nil {
				t.Errorf("%s: %v", line, err)
			}
		}
		if found == 0 {
			t.Errorf("%s has no example", c.CommandPath())
		}
	}
	visit(newRoot(Env{}))
}

// anchors returns the anchors of a page's headings, as GitHub makes them.
func anchors(text string) map[string]bool {
	all := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(block.ReplaceAllString(text, ""), -1) {
		name := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		all["#"+strings.ReplaceAll(name, " ", "-")] = true
	}
	return all
}

// TestDocsReferences checks that the files and headings to which pages link exist, and that the drop reasons that pages
// explain exist.
func TestDocsReferences(t *testing.T) {
	var known []string
	for _, r := range dropreason.All() {
		known = append(known, r.String())
	}
	texts := pages(t)
	links, explained := 0, 0
	for path, text := range texts {
		for _, m := range target.FindAllStringSubmatch(block.ReplaceAllString(text, ""), -1) {
			links += written(path)
			to := path
			if m[1] != "" {
				to = filepath.Join(filepath.Dir(path), m[1])
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s: %v", path, err)
			} else if m[2] != "" && !anchors(texts[to])[m[2]] {
				t.Errorf("%s: %s has no heading %s", path, to, m[2])
			}
		}
		if filepath.Base(path) != "troubleshooting.md" {
			continue
		}
		for _, row := range regexp.MustCompile("(?m)^\\| `[a-z0-9-]+`[^|]*\\|").FindAllString(text, -1) {
			for _, m := range regexp.MustCompile("`([a-z0-9-]+)`").FindAllStringSubmatch(row, -1) {
				explained++
				if !slices.Contains(known, m[1]) {
					t.Errorf("%s explains %s, which is no drop reason", path, m[1])
				}
			}
		}
	}
	t.Logf("%d pages, %d links, %d drop reasons", len(texts), links, explained)
	if links < minLinks || explained < 12 {
		t.Errorf("found %d links and %d drop reasons, want at least %d and 12", links, explained, minLinks)
	}
}

// TestDocsIndex checks that docs/README.md links to every page that is not generated.
func TestDocsIndex(t *testing.T) {
	texts := pages(t)
	docs := filepath.Join("..", "..", "docs")
	index := filepath.Join(docs, "README.md")
	linked := map[string]bool{index: true}
	for _, m := range target.FindAllStringSubmatch(texts[index], -1) {
		linked[filepath.Join(docs, m[1])] = true
	}
	for path := range texts {
		if strings.HasPrefix(path, docs+"/") && written(path) == 1 && !linked[path] {
			t.Errorf("docs/README.md has no link to %s", path)
		}
	}
}

// TestDocsMetrics checks that the list of metrics has all metrics that pages name, for example in alerts.
func TestDocsMetrics(t *testing.T) {
	texts := pages(t)
	listed := map[string]bool{}
	list := texts[filepath.Join("..", "..", "docs", "reference", "metrics.md")]
	for _, m := range regexp.MustCompile("(?m)^\\| `(pilaster_[a-z_]+)` \\|").FindAllStringSubmatch(list, -1) {
		listed[m[1]] = true
	}
	if len(listed) < 30 {
		t.Errorf("found only %d metrics in the list", len(listed))
	}
	named := 0
	for path, text := range texts {
		for _, name := range regexp.MustCompile(`\bpilaster_[a-z_]+\b`).FindAllString(text, -1) {
			named++
			if !listed[name] {
				t.Errorf("%s: got the metric %s, want one that docs/reference/metrics.md lists", path, name)
			}
		}
	}
	if named < 60 {
		t.Errorf("found only %d names of metrics", named)
	}
}

// TestDocsPaths checks that the pages that sources name (in help texts, errors, reports and unit files) exist.
func TestDocsPaths(t *testing.T) {
	root := filepath.Join("..", "..")
	name := regexp.MustCompile(`\bdocs/[a-z/-]+\.(md|yaml)\b`)
	found := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); n == ".git" || n == "bin" || n == "dist" {
				return fs.SkipDir
			}
			return nil
		}
		switch ext := filepath.Ext(path); {
		case slices.Contains([]string{".go", ".html", ".txt", ".h", ".c", ".proto", ".service", ".md"},
			ext) && d.Name() != "CHANGELOG.md":
		case d.Name() == "Makefile":
		default:
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if path == filepath.Join(root, "test", "style", "style_test.go") { // its cases name files that do not exist
			return nil
		}
		for _, page := range name.FindAllString(string(b), -1) {
			found++
			if _, err := os.Stat(filepath.Join(root, page)); err != nil {
				t.Errorf("%s names %s, which does not exist", path, page)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d names of pages", found)
	if found < minNames {
		t.Errorf("found %d names of pages, want at least %d", found, minNames)
	}
}
