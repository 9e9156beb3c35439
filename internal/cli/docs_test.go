package cli

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/reason"
)

// words splits a command line as a shell does, up to a comment.
func words(line string) []string {
	var all []string
	for _, w := range regexp.MustCompile(`'[^']*'|"[^"]*"|(?:\$\([^)]*\)|[^\s'"])+`).FindAllString(line, -1) {
		if w == "#" || w == "|" || w == ">" || w == "&&" {
			break
		}
		if w != "--help" { // every command takes it
			all = append(all, strings.Trim(w, `'"`))
		}
	}
	return all
}

// understood says what is wrong with a command line. A mention may leave out arguments and flags.
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
	target  = regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
)

func guides(t *testing.T) map[string]string {
	t.Helper()
	root := filepath.Join("..", "..")
	paths, _ := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	texts := map[string]string{}
	for _, path := range append(paths, filepath.Join(root, "README.md")) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		texts[path] = string(b)
	}
	return texts
}

// TestDocsCommands: every command in the guides exists, with its flags; those to be typed are complete.
func TestDocsCommands(t *testing.T) {
	typed, mentioned := 0, 0
	for path, text := range guides(t) {
		for _, b := range block.FindAllStringSubmatch(text, -1) {
			for line := range strings.Lines(b[1]) {
				line = strings.TrimPrefix(strings.TrimSpace(line), "$ ")
				if !strings.HasPrefix(line, "pilaster ") {
					continue
				}
				typed++
				if err := understood(line, false); err != nil {
					t.Errorf("%s: %s: %v", path, line, err)
				}
			}
		}
		for _, m := range mention.FindAllStringSubmatch(block.ReplaceAllString(text, ""), -1) {
			mentioned++
			if err := understood(m[1], true); err != nil {
				t.Errorf("%s: `%s`: %v", path, m[1], err)
			}
		}
	}
	if typed < 10 || mentioned < 20 {
		t.Errorf("only %d commands and %d mentions were found", typed, mentioned)
	}
	for _, wrong := range []string{"pilaster nonsense", "pilaster status --nonsense", "pilaster explain", "pilaster agent --uplink eth0", "pilaster tenant nonsense"} {
		if understood(wrong, false) == nil {
			t.Errorf("%q was taken for a command", wrong)
		}
	}
}

// TestExamples: every command, and every family of them, has one that it would take.
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

// TestDocsReferences: files that the guides point at are there, and reasons they tell about are known.
func TestDocsReferences(t *testing.T) {
	var known []string
	for _, r := range reason.All() {
		known = append(known, r.String())
	}
	for path, text := range guides(t) {
		for _, m := range target.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		if filepath.Base(path) != "troubleshooting.md" {
			continue
		}
		told := 0
		for _, row := range regexp.MustCompile("(?m)^\\| `[a-z0-9-]+`[^|]*\\|").FindAllString(text, -1) {
			for _, m := range regexp.MustCompile("`([a-z0-9-]+)`").FindAllStringSubmatch(row, -1) {
				told++
				if !slices.Contains(known, m[1]) {
					t.Errorf("%s tells of %s, which is no reason", path, m[1])
				}
			}
		}
		if told < 12 {
			t.Errorf("%s tells of only %d reasons", path, told)
		}
	}
}
