package report

import (
	"fmt"
	"os"
	"strings"

	"pilaster.io/pilaster/internal/plot"
)

// Marks returns the lines around the tables of a suite in a Markdown file.
func Marks(suite string) (begin, end string) {
	line := "<!-- tables of pilaster bench " + suite + ": %s -->"
	return fmt.Sprintf(line, "begin"), fmt.Sprintf(line, "end")
}

// FillPage replaces the tables of a suite in a Markdown file, between their marks. It does nothing without a file.
func FillPage(file, suite, tables string) error {
	if file == "" {
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("--page: %w", err)
	}
	filled, err := Fill(string(text), suite, tables)
	if err != nil {
		return fmt.Errorf("--page %s: %w; the file was not changed", file, err)
	}
	return os.WriteFile(file, []byte(filled), 0o644)
}

// Fill replaces the tables of a suite in a Markdown text.
func Fill(text, suite, tables string) (string, error) {
	begin, end := Marks(suite)
	before, rest, found := strings.Cut(text, begin+"\n")
	_, after, ends := strings.Cut(rest, end)
	if !found || !ends {
		return "", fmt.Errorf("it has no lines %q and %q", begin, end)
	}
	return before + begin + "\n" + tables + end + after, nil
}

// WriteMarkdown writes a table as Markdown.
func WriteMarkdown(b *strings.Builder, t *plot.Table) {
	row := func(cells []string) { fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | ")) }
	b.WriteByte('\n')
	row(t.Head)
	row(strings.Split(strings.Repeat("---,", len(t.Head)-1)+"---", ","))
	for _, cells := range t.Rows {
		row(cells)
	}
}

// pageWidth is the width of lines in a page.
const pageWidth = 118

// Wrapped breaks a text into lines.
func Wrapped(text string) string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > pageWidth {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	return strings.Join(append(lines, line), "\n")
}
