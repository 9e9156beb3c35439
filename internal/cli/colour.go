package cli

import (
	"io"
	"os"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// colours reports whether w is a terminal of a user who does not refuse colours (https://no-color.org).
func colours(w io.Writer) bool {
	f, isFile := w.(*os.File)
	if !isFile || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

const uncoloured = "\x1b[0m"

// fieldColours are the colours of the fields of an address: cyan, yellow, green, magenta.
var fieldColours = map[string]string{
	"node": "\x1b[36m", "tenant": "\x1b[33m", "app": "\x1b[32m", "index": "\x1b[35m",
}

// fieldRow is the name and the number of a field in the output of explain.
var fieldRow = regexp.MustCompile(`(?m)^  (node|tenant|app|index) +\S+`)

// coloured colours the output of explain: the fields in the address and the rows that decode them.
func (e explanation) coloured(text string) string {
	if e.Plaintext == nil {
		return text
	}
	text = fieldRow.ReplaceAllStringFunc(text, func(row string) string {
		return fieldColours[strings.Fields(row)[0]] + row + uncoloured
	})
	addr := e.Plaintext.String()
	return strings.Replace(text, addr, colourFields(addr), 1)
}

// colourFields colours the digits of a plaintext address by the field that each belongs to.
func colourFields(addr string) string {
	var b strings.Builder
	now, group, groups := "", 0, strings.Split(addr, ":")
	for i, digits := range groups {
		if i > 0 {
			b.WriteByte(':')
		}
		if digits == "" { // "::" stands for groups of zeros
			rest := strings.Fields(strings.Join(groups[i:], " "))
			group = 8 - len(rest)
			continue
		}
		for j, digit := range digits {
			if colour := fieldColours[fieldOf(4*group+4-len(digits)+j)]; colour != now {
				now = colour
				b.WriteString(colour)
			}
			b.WriteRune(digit)
		}
		group++
	}
	return b.String() + uncoloured
}

// fieldOf returns the field of one of the 32 hexadecimal digits of an address: 16 of the node, 6 of the tenant, 4 of
// the app, 6 of the index.
func fieldOf(digit int) string {
	switch {
	case digit < 16:
		return "node"
	case digit < 22:
		return "tenant"
	case digit < 26:
		return "app"
	}
	return "index"
}
