package main

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// maxColumns is the maximum width of a line.
const maxColumns = 120

// tabColumns is the width of a tab: eight in C, as in clang-format; four elsewhere.
func tabColumns(l language) int {
	if l == clang {
		return 8
	}
	return 4
}

// Lines that cannot be broken without losing something.
var (
	url       = regexp.MustCompile(`\b(?:https?|ftp)://`)
	structTag = regexp.MustCompile("`[a-z]+:\"[^`]*`(?:\\s*//.*)?$")
	linkOnly  = regexp.MustCompile(`^\s*(?:[-*] )?(?:!?\[[^\]]*\])\([^)]*\)[.,]?\s*$`)
)

// longWord matches a long text without spaces, such as the name of a metric with its labels, which cannot be broken.
var longWord = regexp.MustCompile(`[^\s]{80,}`)

// checkWidth finds lines of more than maxColumns columns. These may be longer: tables and code fences of Markdown,
// lines with a URL or a very long word, lines with "go:generate", "go:build" or a struct tag, recipes and help of a
// Makefile, and commands of a script.
func checkWidth(f file) (found []finding) {
	if f.language == makefile || f.language == shell {
		return nil
	}
	fenced := false
	for i, line := range f.lines() {
		start := strings.TrimSpace(line)
		if f.language == markdown && (strings.HasPrefix(start, "```") || strings.HasPrefix(start, "~~~")) {
			fenced = !fenced
			continue
		}
		columns := utf8.RuneCountInString(line) + strings.Count(line, "\t")*(tabColumns(f.language)-1)
		switch {
		case columns <= maxColumns, url.MatchString(line):
		case f.language == golang && longWord.MatchString(line):
		case f.language == markdown && (fenced || strings.HasPrefix(start, "|") || linkOnly.MatchString(line)):
		case f.language == golang && (strings.HasPrefix(start, "//go:") || structTag.MatchString(line)):
		default:
			text := fmt.Sprintf("%d columns; at most %d", columns, maxColumns)
			found = append(found, finding{f.path, i + 1, "width", text})
		}
	}
	return found
}
