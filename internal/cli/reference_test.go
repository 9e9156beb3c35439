package cli

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// referenceFolder holds the generated pages of the commands: one for each command family, and README.md with their
// list.
var referenceFolder = filepath.Join("..", "..", "docs", "reference", "cli")

const referenceNotice = "<!-- Code generated from the commands' help by make generate; DO NOT EDIT. -->\n"

// TestReference compares the command reference in docs/ with the help texts. With PILASTER_DOCS=write it writes the
// pages.
func TestReference(t *testing.T) {
	write := os.Getenv("PILASTER_DOCS") == "write"
	for _, v := range append(os.Environ(), "TMPDIR=") { // defaults of flags depend on these variables
		if name, _, _ := strings.Cut(v, "="); name == "TMPDIR" || strings.HasPrefix(name, "PILASTER_") {
			t.Setenv(name, "") // so that the test restores the variable
			os.Unsetenv(name)
		}
	}
	want := referencePages(newRoot(Env{}))
	if len(want) < 15 {
		t.Fatalf("%d pages, want at least 15", len(want))
	}
	var have []string
	files, err := os.ReadDir(referenceFolder)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, f := range files {
		have = append(have, f.Name())
	}
	if write {
		if err := os.MkdirAll(referenceFolder, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, name := range have {
			if _, ok := want[name]; !ok {
				if err := os.Remove(filepath.Join(referenceFolder, name)); err != nil {
					t.Fatal(err)
				}
			}
		}
		for name, text := range want {
			if err := os.WriteFile(filepath.Join(referenceFolder, name), text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		return
	}
	if names := slices.Sorted(maps.Keys(want)); !slices.Equal(have, names) {
		t.Errorf("docs/reference/cli has %q, not %q: run make generate", have, names)
	}
	for name, text := range want {
		if b, err := os.ReadFile(filepath.Join(referenceFolder, name)); err == nil && !bytes.Equal(b, text) {
			t.Errorf("docs/reference/cli/%s differs from the help texts: run make generate", name)
		}
	}
}

// documented reports whether a command is in the reference. Hidden commands and Cobra's own commands are not in it.
func documented(c *cobra.Command) bool {
	return !c.Hidden && c.Name() != "help" && c.Name() != "completion"
}

func referencePages(root *cobra.Command) map[string][]byte {
	pages := map[string][]byte{}
	var index bytes.Buffer
	fmt.Fprintf(&index, "%s# Commands\n\n", referenceNotice)
	writeLong(&index, root.Long)
	index.WriteString("\n| command | does |\n| --- | --- |\n")
	for _, c := range root.Commands() {
		if !documented(c) {
			continue
		}
		fmt.Fprintf(&index, "| [`%s`](%s.md) | %s |\n", c.CommandPath(), c.Name(), cell(c.Short))
		var page bytes.Buffer
		fmt.Fprintf(&page, "%s# %s\n", referenceNotice, c.CommandPath())
		writeCommand(&page, c)
		for _, sub := range c.Commands() {
			if documented(sub) {
				fmt.Fprintf(&page, "\n## %s\n", sub.CommandPath())
				writeCommand(&page, sub)
			}
		}
		if bytes.Count(page.Bytes(), []byte("\n")) > longestPage {
			splitPage(pages, c)
			continue
		}
		pages[c.Name()+".md"] = page.Bytes()
	}
	index.WriteString("\nEvery command takes these flags too:\n")
	writeFlags(&index, root.PersistentFlags())
	pages["README.md"] = index.Bytes()
	return pages
}

// longestPage is the maximum number of lines of a family's page. If the page would be longer, each command of the
// family gets its own page.
const longestPage = 200

func splitPage(pages map[string][]byte, c *cobra.Command) {
	var page bytes.Buffer
	fmt.Fprintf(&page, "%s# %s\n", referenceNotice, c.CommandPath())
	writeCommand(&page, c)
	page.WriteString("\n| command | does |\n| --- | --- |\n")
	for _, sub := range c.Commands() {
		if !documented(sub) {
			continue
		}
		name := c.Name() + "-" + sub.Name() + ".md"
		fmt.Fprintf(&page, "| [`%s`](%s) | %s |\n", sub.CommandPath(), name, cell(sub.Short))
		var own bytes.Buffer
		fmt.Fprintf(&own, "%s# %s\n", referenceNotice, sub.CommandPath())
		writeCommand(&own, sub)
		pages[name] = own.Bytes()
	}
	pages[c.Name()+".md"] = page.Bytes()
}

// writeCommand writes the text below the heading of a command. Below a family's heading, it leaves the subcommands to
// the caller; otherwise it also writes them.
func writeCommand(b *bytes.Buffer, c *cobra.Command) {
	long := c.Long
	if long == "" {
		long = strings.TrimSuffix(c.Short, ".") + "."
	}
	b.WriteString("\n")
	writeLong(b, long)
	if c.Args != nil && (!c.HasSubCommands() || c.LocalNonPersistentFlags().HasAvailableFlags()) {
		fmt.Fprintf(b, "\nUsage: `%s`\n", c.UseLine())
	}
	fmt.Fprintf(b, "\n```\n%s\n```\n", unindent(c.Example))
	writeFlags(b, c.LocalFlags())
	if c.HasParent() && c.Parent().HasParent() && c.Parent().PersistentFlags().HasAvailableFlags() {
		fmt.Fprintf(b, "\nThe flags of `%s` apply too.\n", c.Parent().CommandPath())
	}
	if !c.HasParent() || !c.Parent().HasParent() {
		return // the caller writes its subcommands
	}
	for _, sub := range c.Commands() {
		if documented(sub) {
			fmt.Fprintf(b, "\n## %s\n", sub.CommandPath())
			writeCommand(b, sub)
		}
	}
}

// writeLong writes the paragraphs of a help text as text, and its indented lines as code blocks.
func writeLong(b *bytes.Buffer, long string) {
	var paragraph, code []string
	first := true
	flush := func() {
		if len(paragraph)+len(code) > 0 && !first {
			b.WriteString("\n")
		}
		if len(paragraph) > 0 {
			b.WriteString(wrap(escape(strings.Join(paragraph, " ")), 100))
			first = false
		}
		if len(code) > 0 {
			fmt.Fprintf(b, "```\n%s\n```\n", unindent(strings.Join(code, "\n")))
			first = false
		}
		paragraph, code = nil, nil
	}
	for line := range strings.Lines(long) {
		line = strings.TrimRight(line, "\n")
		indented := strings.HasPrefix(line, " ")
		if line == "" || indented == (len(paragraph) > 0) || !indented && len(code) > 0 {
			flush()
		}
		switch {
		case line == "":
		case indented:
			code = append(code, line)
		default:
			paragraph = append(paragraph, line)
		}
	}
	flush()
}

func writeFlags(b *bytes.Buffer, flags *pflag.FlagSet) {
	rows := ""
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" || f.Name == "version" {
			return
		}
		name := "`--" + f.Name + "`"
		if f.Shorthand != "" {
			name = "`-" + f.Shorthand + "`, " + name
		}
		kind, text := pflag.UnquoteUsage(f)
		value := f.DefValue
		if strings.HasSuffix(f.Value.Type(), "Slice") || strings.HasSuffix(f.Value.Type(), "Array") {
			value = strings.Trim(value, "[]")
		}
		if value == "false" {
			value = ""
		}
		if value != "" {
			value = "`" + value + "`"
		}
		rows += fmt.Sprintf("| %s | %s | %s | %s |\n", name, kind, value, cell(text))
	})
	if rows != "" {
		fmt.Fprintf(b, "\n| flag | value | default | meaning |\n| --- | --- | --- | --- |\n%s", rows)
	}
}

var special = regexp.MustCompile(`[<>*_]`)

func escape(s string) string { return special.ReplaceAllString(s, `\$0`) }

func cell(s string) string { return strings.ReplaceAll(escape(s), "|", `\|`) }

// unindent removes the indentation that all lines share.
func unindent(text string) string {
	lines := strings.Split(strings.Trim(text, "\n"), "\n")
	least := len(text)
	for _, l := range lines {
		if strings.TrimSpace(l) != "" {
			least = min(least, len(l)-len(strings.TrimLeft(l, " ")))
		}
	}
	for i, l := range lines {
		lines[i] = l[min(least, len(l)):]
	}
	return strings.Join(lines, "\n")
}

// wrap breaks text into lines of at most width characters.
func wrap(text string, width int) string {
	var b strings.Builder
	n := 0
	for i, word := range strings.Fields(text) {
		if size := len([]rune(word)); i > 0 && n+1+size > width {
			b.WriteString("\n")
			n = size
		} else {
			if i > 0 {
				b.WriteString(" ")
				n++
			}
			n += size
		}
		b.WriteString(word)
	}
	return b.String() + "\n"
}
