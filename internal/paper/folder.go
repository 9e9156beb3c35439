package paper

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"pilaster.io/pilaster/internal/plot"
)

//go:embed page.html
var pages embed.FS

var page = plot.Pages(pages).Lookup("page.html")

// PageName is the page's file.
const PageName = "index.html"

// Folder keeps figures. Those that another run has left there stay, with where and when they were drawn, until they are
// drawn again.
type Folder string

// Files are what a run with these figures writes.
func Files(only []string) []string {
	all := []string{PageName}
	for _, d := range chosen(only) {
		all = append(all, d.id+".json", d.id+".tsv")
	}
	return all
}

// Put writes a figure's data, and the page anew.
func (d Folder) Put(f Figure) error {
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	var table, page bytes.Buffer
	f.TSV(&table)
	if err := d.write(f.ID+".json", append(data, '\n')); err != nil {
		return err
	}
	if err := d.write(f.ID+".tsv", table.Bytes()); err != nil {
		return err
	}
	all, err := d.figures()
	if err != nil {
		return err
	}
	if err := Page(&page, all); err != nil {
		return err
	}
	return d.write(PageName, page.Bytes())
}

func (d Folder) write(name string, b []byte) error {
	if err := os.WriteFile(filepath.Join(string(d), name), b, 0o644); err != nil {
		return fmt.Errorf("write the figures: %w", err)
	}
	return nil
}

// figures are all that are there, in the paper's order.
func (d Folder) figures() (all []Figure, err error) {
	for _, id := range IDs() {
		path := filepath.Join(string(d), id+".json")
		b, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			continue
		}
		var f Figure
		if err == nil {
			err = json.Unmarshal(b, &f)
		}
		if err != nil {
			return nil, fmt.Errorf(
				"read the figure that an earlier run left in %s: %w; remove the file, or choose another folder",
				path,
				err,
			)
		}
		all = append(all, f)
	}
	return all, nil
}

// Page writes figures as one HTML file that needs no other.
func Page(w io.Writer, figures []Figure) error {
	var missing []string
	for _, d := range definitions {
		has := false
		for _, f := range figures {
			has = has || f.ID == d.id
		}
		if !has {
			missing = append(missing, d.id)
		}
	}
	return page.Execute(w, struct {
		Figures []Figure
		Missing []string
	}{figures, missing})
}
