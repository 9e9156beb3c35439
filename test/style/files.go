package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// language selects how a file is parsed.
type language string

const (
	golang   language = "Go"
	clang    language = "C"
	protobuf language = "protobuf"
	markdown language = "Markdown"
	yaml     language = "YAML"
	makefile language = "Makefile"
	shell    language = "shell"
	plain    language = "text" // unit files, lists of drop reasons
)

// file is a file that git tracks, in a supported language.
type file struct {
	path     string // relative to the root of the repository, with slashes
	language language
	text     []byte
}

func (f file) lines() []string { return strings.Split(strings.TrimSuffix(string(f.text), "\n"), "\n") }

// isTest reports whether a file belongs to tests, or to a package that only tests import.
func (f file) isTest() bool {
	folder := filepath.Base(filepath.Dir(f.path))
	return strings.HasPrefix(f.path, "test/") || strings.HasSuffix(f.path, "_test.go") ||
		strings.HasSuffix(folder, "test") || folder == "testdata"
}

// generated matches the header of generated files, which the checks skip. It is Go's pattern, with the comment marks of
// each language.
var generated = regexp.MustCompile(`(?m)^(?://|/\*|#|<!--) ?Code generated .* DO NOT EDIT\.`)

// ours returns the files of the working tree below the given paths, in supported languages, except generated files, the
// kernel's types, test data and licences.
func ours(root string, paths []string) ([]file, error) {
	list := []string{"-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"}
	command := exec.Command("git", append(list, paths...)...)
	command.Stderr = os.Stderr
	out, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("list the files of git: %w", err)
	}
	var files []file
	folders := map[string]bool{}
	for path := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		as, known := languageOf(path)
		if !known {
			continue
		}
		if folder := filepath.Dir(path); !folders[folder] {
			folders[folder] = true
			// Read the folder, so that go test does not use a cached result after a change in it.
			if _, err := os.ReadDir(filepath.Join(root, folder)); err != nil && !os.IsNotExist(err) {
				return nil, err
			}
		}
		text, err := os.ReadFile(filepath.Join(root, path))
		if os.IsNotExist(err) {
			continue // deleted, and not yet committed
		}
		if err != nil {
			return nil, err
		}
		if as == "" {
			if !bytes.HasPrefix(text, []byte("#!")) {
				continue
			}
			as = shell
		}
		if generated.Match(text[:min(len(text), 1000)]) {
			continue
		}
		files = append(files, file{path: path, language: as, text: text})
	}
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.path, b.path) })
	return slices.CompactFunc(files, func(a, b file) bool { return a.path == b.path }), nil
}

// languageOf returns an empty language for a file without an extension, because its first line determines the language.
func languageOf(path string) (language, bool) {
	if strings.Contains(path, "/testdata/") || strings.HasPrefix(path, "dist/") || path == "bpf/vmlinux.h" {
		return "", false
	}
	switch filepath.Ext(path) {
	case ".go":
		return golang, true
	case ".c", ".h":
		return clang, true
	case ".proto":
		return protobuf, true
	case ".md":
		return markdown, true
	case ".yaml", ".yml":
		return yaml, true
	case ".mk":
		return makefile, true
	case ".sh":
		return shell, true
	case ".service", ".txt":
		return plain, true
	case "":
		if filepath.Base(path) == "Makefile" {
			return makefile, true
		}
		return "", filepath.Base(path) != "LICENSE"
	}
	return "", false
}

// rootOf returns the root of the repository that contains a folder.
func rootOf(folder string) (string, error) {
	folder, err := filepath.Abs(folder)
	if err != nil {
		return "", err
	}
	for dir := folder; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		} else if !os.IsNotExist(err) || dir == filepath.Dir(dir) {
			return "", fmt.Errorf("find go.mod above %s: %w", folder, fs.ErrNotExist)
		}
	}
}
