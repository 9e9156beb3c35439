package main

import (
	"fmt"
	"regexp"
	"strings"
)

// phrase is wording that we replaced, as a regular expression. It matches whole words, in any case, also across lines.
type phrase struct {
	pattern string
	better  string
	reason  string
	except  string // a match is accepted if this expression matches its sentence; empty for no exception
	outside string // folders, separated by blanks, in which the phrase is accepted
}

// Reasons that several phrases share.
const (
	person = "programs and tables are not persons"
	actor  = "the sentence must name the actor"
	term   = "the field has a word for it"
)

// phrases are banned in comments, strings and documents.
var phrases = []phrase{
	{`told`, "is notified, receives, was sent; told apart: distinguished", person, `unless told otherwise`, ""},
	{`tells? of`, "reports", person, "", ""},
	{`hears?|heard|hearing`, "receives, is notified; unheard of: unknown", person, "", ""},
	{`news`, "update", term, "", ""},
	{`speaks?|spoke|spoken|speaking`, "sends, connects; BGP, OpenFlow and the like: uses", person,
		`speak\w* (?:BGP|CNI|DHCP|HTTP|IPv[46]|LACP|OpenFlow|OVSDB|TLS|gRPC)`, ""},
	{`whoever|whomever`, "the actor's name", actor, "", ""},
	{`nobody|nobody's`, "no node, no container, nothing", actor, `user nobody|User=nobody|uid 65534`, ""},
	{`somebody|somebody's|someone`, "another process, an administrator, a client", actor, "", ""},
	{`anybody|anybody's|everybody|everybody's`, "any container, all nodes", actor, "", ""},
	{`drawn|drew|draws an? (?:index|id|address|number)`, "allocated, chosen at random", term,
		`plot|figure|chart|curve|ax[ie]s|diagram|picture|SVG|line|Drawn`, "internal/plot internal/paper"},
	{`(?:given?|gives|gave|giving)(?: \w+){0,2} back`, "released", term, "", ""},
	{`rests|rested|resting|at rest`, "is quarantined; rests on: depends on", term,
		`encrypt\w* at rest|(?i:rests on)`, ""},
	{`rests on`, "depends on", term, "", ""},
	{`judged|judging`, "policy is applied, is checked", term, "", "test"},
	{`judges? (?:packets?|connections?|flows?|sessions?)`, "applies policy to", term, "", ""},
	{`held back`, "pending, delayed", term, "", ""},
	{`(?:polic(?:y|ies)|changes?) (?:is|are|was|were) held`, "pending", term, "", ""},
	{`carried tenants?|carries? (?:\w+ )?tenants?|tenants? (?:\w+ )?(?:is|are) carried`,
		"transit tenants", term, "", ""},
	{`guest(?:'s)? address(?:es)?|as a guest|guest among`, "alias", term, "", ""},
	{`bench clean-up`, "bench flow-delete", "the command has another name", "", ""},
	{`bench builds`, "bench compare", "the command has another name", "", ""},
	{`(?:pilaster_)?policed_tenants`, "policy_tenants", "the metric has another name", "", ""},
	{`(?:pilaster_orchestrator_)?apps_resting`, "app_ids_quarantined", "the metric has another name", "", ""},
	{`(?:pilaster_orchestrator_)?changes_waiting`, "store_queue_length", "the metric has another name", "", ""},
	{`(?:pilaster_)?datapath_first_in_chain`, "datapath_tcx_first", "the metric has another name", "", ""},
}

// exempt are files in which the phrases are accepted, and why.
var exempt = map[string]string{
	"test/style/phrases.go":     "the list of phrases",
	"test/style/identifiers.go": "the list of names",
	"test/style/style_test.go":  "cases for the rules",
}

type compiledPhrase struct {
	phrase
	match, except *regexp.Regexp
}

var compiledPhrases = func() (all []compiledPhrase) {
	for _, p := range phrases {
		words := strings.ReplaceAll(p.pattern, " ", `\s+`)
		c := compiledPhrase{phrase: p, match: regexp.MustCompile(`(?i)\b(?:` + words + `)\b`)}
		if p.except != "" {
			c.except = regexp.MustCompile(strings.ReplaceAll(p.except, " ", `\s+`))
		}
		all = append(all, c)
	}
	return all
}()

// checkPhrases finds wording that we replaced.
func checkPhrases(f file) (found []finding) {
	if exempt[f.path] != "" {
		return nil
	}
	for _, s := range segments(f) {
		for _, p := range compiledPhrases {
			if isBelow(f.path, p.outside) {
				continue
			}
			for _, at := range p.match.FindAllStringIndex(s.text, -1) {
				if isKey(s.text, at[0], at[1]) ||
					p.except != nil && p.except.MatchString(sentence(s.text, at[0], at[1])) {
					continue
				}
				line := s.line + strings.Count(s.text[:at[0]], "\n")
				words := strings.Join(strings.Fields(s.text[at[0]:at[1]]), " ")
				text := fmt.Sprintf("%q: better %s (%s)", words, p.better, p.reason)
				found = append(found, finding{f.path, line, "phrase", text})
			}
		}
	}
	return found
}

// isKey reports whether a match is a key of JSON, or part of a name with hyphens or slashes. Other programs use these
// names, so they are accepted.
func isKey(text string, from, to int) bool {
	before, after := text[:from], text[to:]
	return hyphened.MatchString(before[max(0, from-2):]) || hyphenNext.MatchString(after) ||
		strings.HasSuffix(before, `"`) && strings.HasPrefix(after, `":`)
}

var (
	hyphened   = regexp.MustCompile(`\w[-/]$`)
	hyphenNext = regexp.MustCompile(`^(?:[-/]\w|/")`)
)

// isBelow reports whether a path is in one of some folders.
func isBelow(path, folders string) bool {
	for folder := range strings.FieldsSeq(folders) {
		if strings.HasPrefix(path, folder+"/") {
			return true
		}
	}
	return false
}

// sentence returns the text around a match, up to the full stop or the empty line on each side.
func sentence(text string, from, to int) string {
	start := max(strings.LastIndex(text[:from], ". "), strings.LastIndex(text[:from], ".\n"),
		strings.LastIndex(text[:from], "\n\n"))
	end := len(text)
	for _, stop := range []string{". ", ".\n", "\n\n"} {
		if i := strings.Index(text[to:], stop); i >= 0 {
			end = min(end, to+i)
		}
	}
	return text[max(start, 0):end]
}
