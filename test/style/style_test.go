package main

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"
)

// remaining are the folders that still have findings, and how many findings each may have. Other folders may have none.
// The numbers may only decrease.
var remaining = map[string]int{}

// minFiles is a lower bound for the number of files in the tree, to detect an incomplete listing.
const minFiles = 700

func TestTree(t *testing.T) {
	root, err := rootOf(".")
	if err != nil {
		t.Fatal(err)
	}
	files, err := ours(root, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < minFiles {
		t.Fatalf("%d files; the tree has at least %d", len(files), minFiles)
	}
	perLanguage := map[language]int{}
	for _, f := range files {
		perLanguage[f.language]++
	}
	for l, least := range map[language]int{
		golang: 600, clang: 25, markdown: 15, protobuf: 3, yaml: 4, makefile: 1, shell: 2, plain: 3,
	} {
		if perLanguage[l] < least {
			t.Errorf("%d files in %s; the tree has at least %d", perLanguage[l], l, least)
		}
	}
	found := check(files)
	counts := map[string]int{}
	for _, f := range found {
		if f.rule != "duplicate" {
			counts[path.Dir(f.file)]++
		}
	}
	for _, f := range found {
		if folder := path.Dir(f.file); f.rule != "duplicate" && counts[folder] > remaining[folder] {
			t.Error(f)
		}
	}
	for folder, most := range remaining {
		if counts[folder] < most {
			t.Logf("%s has %d findings and may have %d: lower the number in the list", folder, counts[folder], most)
		}
	}
	t.Logf("%d findings in %d files", len(found), len(files))
	code := duplicates(files)
	for line := range known {
		if !slices.ContainsFunc(code, func(b block) bool { return b.longest == line }) {
			t.Errorf("no block with the line %q stands twice: remove it from the list", line)
		}
	}
	for _, f := range found {
		if f.rule == "duplicate" {
			t.Error(f)
		}
	}
	for name := range exempt {
		if !slices.ContainsFunc(files, func(f file) bool { return f.path == name }) {
			t.Errorf("there is no file %s: remove it from the exempt files", name)
		}
	}
}

func isIn(path, folder string) bool {
	return folder == "." || strings.HasPrefix(path, folder+"/") || path == folder
}

// foundIn returns the findings of all rules in a file, as "line: rule".
func foundIn(path, text string) []string {
	l, known := languageOf(path)
	if !known {
		return []string{"unknown language"}
	}
	var found []string
	for _, f := range check([]file{{path, l, []byte(text)}}) {
		found = append(found, fmt.Sprintf("%d %s", f.line, f.rule))
	}
	return found
}

func TestWidth(t *testing.T) {
	at, over := strings.Repeat("x", maxColumns), strings.Repeat("x", maxColumns+1)
	wide := "wide " + strings.Repeat("word ", 30)
	for name, c := range map[string]struct {
		path, text string
		want       []string
	}{
		"just fits":          {"a.md", at, nil},
		"one too many":       {"a.md", "\n" + over, []string{"2 width"}},
		"runes, not bytes":   {"a.md", strings.Repeat("→", maxColumns), nil},
		"tab in Go":          {"a.go", "package a\n\n//\t" + at[:maxColumns-6], nil},
		"wide tab in Go":     {"a.go", "package a\n\n//\t" + wide[:maxColumns-5], []string{"3 width"}},
		"tab in C":           {"bpf/a.h", "\t" + at[:maxColumns-8], nil},
		"wide tab in C":      {"bpf/a.h", "\t" + at[:maxColumns-7], []string{"1 width"}},
		"URL":                {"a.md", wide + "https://example.org/", nil},
		"table":              {"a.md", "  | " + wide, nil},
		"list":               {"a.md", "- " + wide, []string{"1 width"}},
		"fence":              {"a.md", "```\n" + wide + "\n```\n" + wide, []string{"4 width"}},
		"link alone":         {"a.md", "- [what](" + over + ")", nil},
		"go:generate":        {"a.go", "package a\n\n//go:generate " + wide, nil},
		"Go comment":         {"a.go", "package a\n\n// " + wide, []string{"3 width"}},
		"struct tag":         {"a.go", "package a\n\ntype a struct {\n\tB int `json:\"" + over + "\"`\n}", nil},
		"raw string":         {"a.go", "package a\n\nconst a = `" + wide + "`", []string{"3 width"}},
		"long word":          {"a.go", "package a\n\n// " + wide + over, nil},
		"Makefile":           {"Makefile", "a: ## " + wide, nil},
		"workflow":           {"docs/a.yaml", "# " + wide, []string{"1 width"}},
		"script":             {"a.sh", "# " + wide, nil},
		"protobuf":           {"api/a.proto", "// " + wide, []string{"1 width"}},
		"C":                  {"bpf/a.bpf.c", "/* " + wide + " */", []string{"1 width"}},
		"the kernel's types": {"bpf/vmlinux.h", wide, []string{"unknown language"}},
	} {
		if got := foundIn(c.path, c.text); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestIdentifiers(t *testing.T) {
	one := []string{"3 identifier"}
	for name, c := range map[string]struct {
		path, text string
		want       []string
	}{
		"package":           {"internal/x/x.go", "package together", []string{"1 identifier"}},
		"its tests":         {"internal/x/x_test.go", "package together_test", []string{"1 identifier"}},
		"package elsewhere": {"cmd/x/x.go", "package cni", nil},
		"package here":      {"internal/x/x.go", "package cni", []string{"1 identifier"}},
		"type":              {"internal/agent/a.go", "package a\n\ntype surroundings struct{}", one},
		"function":          {"internal/agent/a.go", "package a\n\nfunc hear() {}", one},
		"method":            {"internal/agent/a.go", "package a\n\nfunc (a) hear() {}", one},
		"interface":         {"internal/agent/a.go", "package a\n\ntype a interface { hear() }", one},
		"field":             {"internal/agent/a.go", "package a\n\ntype a struct { told bool }", one},
		"variable":          {"internal/x/a.go", "package a\n\nvar told bool", one},
		"constant":          {"internal/x/a.go", "package a\n\nconst told = 1", one},
		"parameter":         {"internal/x/a.go", "package a\n\nfunc f(told bool) { news := told; _ = news }", nil},
		"of another kind":   {"internal/datapath/a.go", "package a\n\ntype a struct { kind string }", nil},
		"of that kind":      {"internal/datapath/a.go", "package a\n\ntype kind string", one},
		"nearly elsewhere":  {"internal/datapathx/a.go", "package a\n\ntype kind string", nil},
		"below":             {"internal/datapath/x/a.go", "package a\n\ntype kind string", one},
		"strings":           {"internal/cli/a.go", "package a\n\nvar a = []string{`surroundings`}", nil},
		"file":              {"internal/agent/given.go", "package a", []string{"1 identifier"}},
		"C struct":          {"bpf/a.h", "\n\nstruct source { int a; };", one},
		"C use":             {"bpf/a.h", "\n\nint f(struct local *l);", one},
		"C local":           {"bpf/a.h", "\n\nint f(struct addr *local) { return source + step; }", nil},
		"C function":        {"bpf/a.h", "\n\nint step(void);", one},
		"C field":           {"bpf/a.h", "\n\nint f(struct a *a) { return a->losers; }", one},
		"C macro":           {"bpf/a.h", "\n\n#define SELDOM 1", one},
		"C comment":         {"bpf/a.h", "/* struct source { } */\n// desk\n", nil},
		"C string":          {"bpf/a.h", `char *a = "desk \" desk"; /* " */`, nil},
		"C after a quote":   {"bpf/a.h", "char a = '\"';\n\nint desk;", one},
		"C map pin":         {"bpf/a.h", "\n\nint pil_desk;", nil},
		"C header":          {"bpf/police.h", "", []string{"1 identifier"}},
	} {
		if got := foundIn(c.path, c.text); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestPhrases(t *testing.T) {
	one := []string{"3 phrase"}
	for name, c := range map[string]struct {
		path, text string
		want       []string
	}{
		"document":         {"docs/a.md", "a\n\nThe node is told so.", one},
		"at the line end":  {"docs/a.md", "a\n\nThe address is given\nback.", one},
		"capital":          {"docs/a.md", "a\n\nNobody does.", one},
		"part of a word":   {"docs/a.md", "The newsletter, the untold, hearsay, `told_total`.", nil},
		"Go comment":       {"internal/x/a.go", "package a\n\n// Tenants are told.", one},
		"two comments":     {"internal/x/a.go", "package a\n\n// It is given\n// back.", one},
		"block comment":    {"internal/x/a.go", "package a\n\n/* It is given\n * back. */", one},
		"string":           {"internal/x/a.go", "package a\n\nvar a = \"nobody\"", one},
		"raw string":       {"internal/x/a.go", "package a\n\nvar a = `nobody`", one},
		"in a raw string":  {"internal/x/a.go", "package a\nvar a = `\nnobody`", one},
		"identifier":       {"internal/x/a.go", "package a\n\nfunc f() { nobody := 1; _ = nobody }", nil},
		"import":           {"internal/x/a.go", "package a\n\nimport _ \"nobody\"", nil},
		"tag":              {"internal/x/a.go", "package a\n\ntype a struct { B int `json:\"nobody\"` }", nil},
		"C comment":        {"bpf/a.h", "\n\n/* Nobody */", one},
		"C comments":       {"bpf/a.h", "\n\n/* given */\n/* back */", one},
		"C apart":          {"bpf/a.h", "int a; /* given */\nint b; /* back */", nil},
		"C code":           {"bpf/a.h", "int nobody;", nil},
		"protobuf":         {"api/a.proto", "\n\n// Nobody.", one},
		"protobuf field":   {"api/a.proto", "bool news = 1;", nil},
		"Makefile":         {"Makefile", "\n\na: ## nobody", one},
		"command":          {"docs/a.md", "\n\n`pilaster bench builds`", one},
		"old alias":        {"internal/cli/a.go", "package a\n\nvar a = []string{\"builds\"}", nil},
		"metric":           {"docs/a.md", "\n\n`pilaster_policed_tenants`", one},
		"key of the store": {"docs/a.md", "`resting-apps/TENANT/ID`", nil},
		"directory":        {"internal/x/a.go", "package a\n\nconst a = root + \"resting/\"", nil},
		"key of JSON":      {"docs/a.md", "{\"resting\": 1}", nil},
		"dash":             {"docs/a.md", "\n\nIt - nobody - is.", one},
		"folder":           {"internal/plot/a.go", "package a\n\n// A line is drawn.", nil},
		"list of phrases":  {"test/style/phrases.go", "package a\n\n// nobody", nil},
	} {
		if got := foundIn(c.path, c.text); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	// Each phrase is found in one text, and accepted in another.
	for text, want := range map[string]int{
		"it is told of": 1, "unless told otherwise": 0, "it tells of packets": 1, "it tells whether": 0,
		"the node hears it": 1, "unheard": 0, "it has heard": 1, "good news": 1, "who speaks": 1, "it speaks BGP": 0,
		"whoever comes": 1, "nobody": 1, "runs as user nobody": 0, "somebody else": 1, "everybody's": 1,
		"an id is drawn from the pool": 1, "the figure is drawn": 0, "drawn as a plot. An id is drawn": 1,
		"it gives the id back": 1, "the address was given back": 1, "it gave back": 1, "it comes back": 0,
		"the id rests": 1, "ids at rest": 1, "it is encrypted at rest": 0, "the rest of it": 0,
		"that rests on bpffs": 1,
		"packets are judged":  1, "an independent judge": 0, "it judges packets": 1, "it is held back": 1,
		"the lock is held":  0,
		"policies are held": 1, "carried tenants": 1, "packets are carried by the fabric": 0, "the guest address": 1,
		"the container guest": 0, "pilaster bench clean-up": 1, "pilaster_orchestrator_apps_resting": 1,
		"changes_waiting":                  1,
		"pilaster_datapath_first_in_chain": 1, "first_in_chain": 0,
	} {
		if got := foundIn("docs/a.md", text+"\n"); len(got) != want {
			t.Errorf("%q: %v, want %d", text, got, want)
		}
	}
}

func TestDuplicates(t *testing.T) {
	body := func(n int, name string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "\t%s%d()\n", name, i)
		}
		return b.String()
	}
	text := func(first string, rest ...string) string {
		return fmt.Sprintf("package a\n\nimport \"fmt\"\n\nfunc %s() {\n%s}\n", first, strings.Join(rest, ""))
	}
	count := func(files ...file) (lines []int) {
		for _, b := range duplicates(files) {
			lines = append(lines, b.lines)
		}
		return lines
	}
	a := file{"a/a.go", golang, []byte(text("f", body(12, "x")))}
	for name, c := range map[string]struct {
		files []file
		want  []int
	}{
		"twelve and a brace": {[]file{a, {"b/b.go", golang, []byte(text("g", body(12, "x")))}}, []int{13}},
		"eleven":             {[]file{a, {"b/b.go", golang, []byte(text("g", body(11, "x")))}}, nil},
		"spaced and commented": {[]file{a, {"b/b.go", golang,
			[]byte(text("g", strings.ReplaceAll(body(12, "x"), "\n", " // why\n\n\t// more\n")))}}, []int{13}},
		"in one file": {[]file{
			{"a/a.go", golang, []byte(text("f", body(20, "x"), body(20, "y"), body(20, "x")))},
		}, []int{20}},
		"two blocks": {[]file{
			{"a/a.go", golang, []byte(text("f", body(20, "x"), "z()\n", body(20, "y")))},
			{"b/b.go", golang, []byte(text("g", body(20, "y"), "w()\n", body(20, "x")))},
		}, []int{20, 20}},
		"repeated": {[]file{{"a/a.go", golang, []byte(text("f", strings.Repeat("\tx()\n", 12)))}}, nil},
		"tests": {[]file{
			a, {"b/b_test.go", golang, a.text}, {"test/b.go", golang, a.text}, {"x/xtest/b.go", golang, a.text},
		}, nil},
		"C": {[]file{
			{"a.h", clang, []byte(body(20, "x"))}, {"b.h", clang, []byte("int a; /* b */\n" + body(20, "x"))},
		}, []int{20}},
		"C and prose": {[]file{
			{"a.h", clang, []byte("/*" + body(20, "x") + "*/")}, {"b.h", clang, []byte("/*" + body(20, "x") + "*/")},
		}, nil},
		"only imports": {[]file{
			{"a/a.go", golang, []byte("package a\nimport (\n" + strings.Repeat("\"a\"\n", 30) + ")")},
			{"b/b.go", golang, []byte("package b\nimport (\n" + strings.Repeat("\"a\"\n", 30) + ")")},
		}, nil},
	} {
		got := count(c.files...)
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: blocks of %v lines, want %v", name, got, c.want)
		}
	}
}
