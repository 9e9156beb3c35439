// Package choice is a command-line flag with a fixed set of values, in upper or lower case.
package choice

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// flag rejects other values while flags are parsed, before the command does anything.
type flag struct {
	to *string
	of []string
}

func (f flag) String() string {
	if f.to == nil {
		return ""
	}
	return *f.to
}

func (flag) Type() string { return "kind" }

func (f flag) Set(value string) error {
	i := slices.IndexFunc(f.of, func(one string) bool { return strings.EqualFold(one, value) })
	if i < 0 {
		return fmt.Errorf("use %s", strings.Join(f.of, ", "))
	}
	*f.to = f.of[i]
	return nil
}

// Bind adds a flag whose default is the first choice.
func Bind(c *cobra.Command, to *string, name, usage string, of []string) {
	*to = of[0]
	c.Flags().Var(flag{to, of}, name, usage)
	_ = c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(of, cobra.ShellCompDirectiveNoFileComp))
}
