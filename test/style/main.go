// Command style checks how the source reads: the width of lines, replaced identifiers and phrases, and duplicate code.
// Its tests also check the imports between packages, and the size of packages.
//
//	go run ./test/style [-summary] [PATHS...]
//
// It prints a line for each finding, file:line: rule: text, and exits with 1 if there is one. Without paths it checks
// all files that git tracks or would add. With -summary it prints a count per folder and rule instead.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
)

// finding is a violation of a rule.
type finding struct {
	file       string
	line       int
	rule, text string
}

func (f finding) String() string { return fmt.Sprintf("%s:%d: %s: %s", f.file, f.line, f.rule, f.text) }

// rules are the rules that check one file at a time.
var rules = []struct {
	name  string
	check func(file) []finding
}{
	{"width", checkWidth},
	{"identifier", checkIdentifiers},
	{"phrase", checkPhrases},
}

func main() {
	summary := flag.Bool("summary", false, "print a count per folder and rule")
	flag.Parse()
	found, checked, err := checkTree(flag.Args())
	if err == nil && checked == 0 {
		err = fmt.Errorf("no files in %v", flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(2)
	}
	if *summary {
		summarize(os.Stdout, found)
	} else {
		for _, f := range found {
			fmt.Println(f)
		}
	}
	if len(found) > 0 {
		os.Exit(1)
	}
}

// checkTree checks the files below the given paths of the working folder, or the whole repository around it.
func checkTree(paths []string) (found []finding, checked int, err error) {
	here, err := os.Getwd()
	if err != nil {
		return nil, 0, err
	}
	root, err := rootOf(here)
	if err != nil {
		return nil, 0, err
	}
	for i, p := range paths {
		if paths[i], err = filepath.Rel(root, filepath.Join(here, p)); err != nil {
			return nil, 0, err
		}
	}
	files, err := ours(root, paths)
	if err != nil {
		return nil, 0, err
	}
	return check(files), len(files), nil
}

// check applies all rules. It searches for duplicates only among the given files.
func check(files []file) (found []finding) {
	for _, f := range files {
		for _, r := range rules {
			found = append(found, r.check(f)...)
		}
	}
	found = append(found, checkDuplicates(files)...)
	slices.SortStableFunc(found, func(a, b finding) int {
		return cmp.Or(strings.Compare(a.file, b.file), cmp.Compare(a.line, b.line), strings.Compare(a.rule, b.rule))
	})
	return found
}

// summarize prints a table: a line per folder, a column per rule.
func summarize(w io.Writer, found []finding) {
	columns := []string{"width", "identifier", "phrase", "duplicate"}
	counts := map[string]map[string]int{}
	for _, f := range found {
		for _, folder := range []string{path.Dir(f.file), "total"} {
			if counts[folder] == nil {
				counts[folder] = map[string]int{}
			}
			counts[folder][f.rule]++
		}
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "%s\t  folder\n", strings.Join(columns, "\t"))
	folders := make([]string, 0, len(counts))
	for folder := range counts {
		if folder != "total" {
			folders = append(folders, folder)
		}
	}
	slices.Sort(folders)
	for _, folder := range append(folders, "total") {
		for _, c := range columns {
			fmt.Fprintf(t, "%d\t", counts[folder][c])
		}
		fmt.Fprintf(t, "  %s\n", folder)
	}
	t.Flush()
}
