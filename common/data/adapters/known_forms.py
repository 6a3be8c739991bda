"""Data sets by name whose rows have a usual form, but lie elsewhere on the hub or must be put together."""

from common.data.adapters.base import register_dataset
from common.data.adapters.local_files import AnyForm
from common.data.adapters.message_trees import group_trees
from common.data.adapters.rankings import group_scored
from common.data.grouped_rows import GroupedRows
from common.data.hub_data import HubPlace
from common.data.raw_rows import RawRows


@register_dataset("OpenAssistant/oasst1", "OpenAssistant/oasst2")
class OpenAssistant(AnyForm):
    """Messages that name their parent, put together to trees."""

    def arrange(self, rows: RawRows) -> GroupedRows:
        """See Adapter."""
        return group_trees(rows)


@register_dataset("nvidia/HelpSteer2")
class HelpSteer2(AnyForm):
    """Responses with scores, those of one prompt put together."""

    def arrange(self, rows: RawRows) -> GroupedRows:
        """See Adapter."""
        return group_scored(rows, self.score_column)


@register_dataset("nvidia/HelpSteer3", "HuggingFaceH4/ultrafeedback_binarized", "berkeley-nest/Nectar")
class ElsewhereOnTheHub(AnyForm):
    """Two responses with a preference; pairs as message lists; seven ranked answers."""

    hub_places = {
        "nvidia/HelpSteer3": HubPlace("nvidia/HelpSteer3", "preference"),
        "HuggingFaceH4/ultrafeedback_binarized": HubPlace(
            "HuggingFaceH4/ultrafeedback_binarized", splits=("train_prefs", "test_prefs")
        ),
    }
