package cli

import (
	"os"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/demo"
)

func newDemoCommand(env Env) *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:     "demo",
		Short:   "Start a network of 3 nodes on this machine, verify it, and remove it",
		Example: "  pilaster demo\n  pilaster demo --keep",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if err := requireRoot("demo"); err != nil {
				return err
			}
			o.Command = os.Args[0]
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			return demo.Run(c.Context(), env.Stdout, o)
		},
	}
	c.Flags().BoolVar(&o.Keep, "keep", false, "keep the network, and print commands to look at it")
	c.Flags().StringVar(&o.Root, "lab-root", os.Getenv("PILASTER_LAB_ROOT"), "folder of all labs (PILASTER_LAB_ROOT)")
	return c
}
