package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
)

// segment is text for people: a comment, a string literal or a document. Its lines are the file's lines.
type segment struct {
	line int // first line
	text string
}

// segments returns the texts of a file: comments and strings of a program, or the whole document.
func segments(f file) []segment {
	switch f.language {
	case golang:
		return goSegments(f)
	case clang, protobuf:
		_, texts := splitC(string(f.text))
		return texts
	}
	return []segment{{1, string(f.text)}}
}

// parseGo returns nil if the text is not valid Go, which the compiler reports.
func parseGo(f file) (*token.FileSet, *ast.File) {
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, f.path, f.text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return set, nil
	}
	return set, tree
}

func goSegments(f file) (texts []segment) {
	set, tree := parseGo(f)
	if tree == nil {
		return nil
	}
	for _, group := range tree.Comments {
		from, to := set.Position(group.Pos()), set.Position(group.End())
		texts = append(texts, segment{from.Line, uncomment(string(f.text[from.Offset:to.Offset]))})
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.Field:
			n.Tag = nil // tags are not text for people
		case *ast.BasicLit:
			if n.Kind == token.STRING {
				texts = append(texts, segment{set.Position(n.Pos()).Line, n.Value})
			}
		}
		return true
	})
	return texts
}

// uncomment removes comment marks, so that a phrase on two lines is found.
func uncomment(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		line = strings.TrimSpace(line)
		for _, mark := range []string{"//", "/*", "*"} {
			if rest, marked := strings.CutPrefix(line, mark); marked && !strings.HasPrefix(line, "*/") {
				line = rest
				break
			}
		}
		lines[i] = strings.TrimSuffix(line, "*/")
	}
	return strings.Join(lines, "\n")
}

// splitC splits C or protobuf source. In code, blanks replace comments, literals and #include lines, and line breaks
// remain. texts has the comments and strings. Comments on consecutive lines are one segment.
func splitC(text string) (code string, texts []segment) {
	out := []byte(text)
	blank := func(from, to int) {
		for i := from; i < to; i++ {
			if out[i] != '\n' {
				out[i] = ' '
			}
		}
	}
	line, comments := 1, 0 // comments: the line after the last comment ended, if nothing but space followed
	for i := 0; i < len(text); {
		end, comment := i, false
		switch {
		case strings.HasPrefix(text[i:], "/*"):
			end, comment = closing(text, i+2, "*/"), true
		case strings.HasPrefix(text[i:], "//"):
			end, comment = i+strings.IndexByte(text[i:]+"\n", '\n'), true
		case text[i] == '"' || text[i] == '\'':
			end = closeQuote(text, i)
		case strings.HasPrefix(text[i:], "#include"):
			blank(i, i+strings.IndexByte(text[i:]+"\n", '\n'))
			i += strings.IndexByte(text[i:]+"\n", '\n')
			continue
		}
		if end == i {
			if text[i] == '\n' {
				line++
			} else if text[i] != ' ' && text[i] != '\t' {
				comments = 0
			}
			i++
			continue
		}
		if last := len(texts) - 1; comment && comments == line && last >= 0 {
			texts[last].text += "\n" + uncomment(text[i:end])
		} else if comment {
			texts = append(texts, segment{line, uncomment(text[i:end])})
		} else if text[i] == '"' {
			texts = append(texts, segment{line, text[i:end]})
		}
		blank(i, end)
		line += strings.Count(text[i:end], "\n")
		if comment {
			comments = line + 1
		}
		i = end
	}
	return string(out), texts
}

func closing(text string, from int, mark string) int {
	if i := strings.Index(text[from:], mark); i >= 0 {
		return from + i + len(mark)
	}
	return len(text)
}

func closeQuote(text string, from int) int {
	for i := from + 1; i < len(text) && text[i] != '\n'; i++ {
		switch text[i] {
		case '\\':
			i++
		case text[from]:
			return i + 1
		}
	}
	return from + 1
}
