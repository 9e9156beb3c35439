// Package version names the build of a Pilaster program: the release that the file VERSION holds, and the commit that
// the Go linker recorded.
package version

import (
	_ "embed"
	"runtime/debug"
	"strings"
)

//go:embed VERSION
var release string

// shortCommit is how many hexadecimal digits of a commit String and Describe show.
const shortCommit = 12

// Build is a release and the source that it was built from.
type Build struct {
	Release  string // as in the file VERSION: v0.1.0
	Commit   string // of the source, 40 hexadecimal digits; empty if the linker did not record it
	Modified bool   // the source had uncommitted changes
	Time     string // of the commit, RFC 3339; empty as Commit is
}

// Current is the build of the running program.
func Current() Build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	b := Recorded(info)
	b.Release = strings.TrimSpace(release)
	return b
}

// Recorded is what the Go linker recorded in a program. It has no release, which only the program itself knows.
func Recorded(info *debug.BuildInfo) Build {
	var b Build
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		case "vcs.time":
			b.Time = s.Value
		}
	}
	return b
}

// String is what daemons report to each other: v0.1.0+6105057a1b2c.modified. What follows the + is build metadata as
// Semantic Versioning 2.0.0 §10 defines it; it is left out if the linker did not record a commit.
func (b Build) String() string {
	text := b.Release
	if b.Commit != "" {
		text += "+" + b.short()
		if b.Modified {
			text += ".modified"
		}
	}
	return text
}

// Describe is a build for people: v0.1.0 (commit 6105057a1b2c, modified). A part that is not known is left out; the
// text of a build of which nothing is known is empty.
func (b Build) Describe() string {
	if b.Commit == "" {
		return b.Release
	}
	source := "commit " + b.short()
	if b.Modified {
		source += ", modified"
	}
	if b.Release == "" {
		return source
	}
	return b.Release + " (" + source + ")"
}

func (b Build) short() string { return b.Commit[:min(len(b.Commit), shortCommit)] }
